"""The client of Sluice: text in and out, recorded KV caches, and a pusher for prefill nodes written in Python.

`tools/sluice` is the command (cli.py). Programs import `sluice_client.pusher.Pusher` and
`sluice_client.generate.generate`; tools/setup puts this package on the path of .venv/bin/python.
"""
