"""Helpers that end-to-end tests, benches and the tests of deploy/ share: nodes, clients, tables of bad input."""
