"""What the connectors of all engines share: settings, reserving, streaming, committing and aborting at a decode node.

An engine's own package (vllm_connector, sglang_sender) says how its caches lie and when they are computed.
"""
