"""vLLM's side of a hand-off: a KV connector that sends each prompt's caches to a Sluice decode node.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "SluiceConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "sluice_client.vllm_connector",
        "kv_connector_extra_config": {"decode": "127.0.0.1:7000"}}'

A request that says kv_transfer_params {"do_remote_decode": true} is handed over: room for it is reserved at the decode
node when vLLM's scheduler would admit it, every layer is sent as soon as vLLM has saved it, and the transfer is
committed with the tokens that vLLM chose. The answer's kv_transfer_params go to the decode node with the decode leg,
unread. Other requests are vLLM's own.
"""

from sluice_client.vllm_connector.connector import SluiceConnector

__all__ = ["SluiceConnector"]
