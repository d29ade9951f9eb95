"""SGLang's side of a hand-off: a transfer backend that sends each prompt's caches to a Sluice decode node.

    SGLANG_SLUICE='{"decode": "127.0.0.1:7000"}' sglang serve --model-path MODEL --disaggregation-mode prefill \\
        --disaggregation-transfer-backend sluice

`pip install ./tools` in SGLang's environment registers the backend as a plugin (entry point `sglang.srt.plugins`). Room
for a prompt is reserved at the decode node before SGLang's scheduler admits it, each chunk is sent when it is computed,
and the transfer is committed with the token that SGLang chose. The decode leg names the request's bootstrap_room as its
rendezvous_key.
"""
