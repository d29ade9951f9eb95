"""Sluice for people and programs: text in and out, recorded caches, a prefill node's own pusher.

`tools/sluice` is the command (cli.py). Programs import `sluice_client.pusher.Pusher` and
`sluice_client.generate.generate`; tools/setup puts this package on the path of .venv/bin/python.
"""
