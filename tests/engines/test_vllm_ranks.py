"""A vLLM of three ranks, each of which sends its own heads."""

import pytest
from engine_lab import HANDED_OVER, Vllm, decoded
from support.nodes import matching_steps

MARGIN = 0.2  # as in test_vllm_serve.py


@pytest.mark.parametrize("flags", [["--tensor-parallel-size", "3"]])
def test_ranks_send_their_heads(smollm2, decode, chats, tmp_path, flags):
    """The real model has 9 heads and 3 KV heads."""
    engine = Vllm(smollm2, tmp_path, {"decode": decode.address}, "--max-model-len", "4096", "--max-num-batched-tokens",
                  "256", *flags)
    try:
        engine.wait()
        for case in (chats[0], chats[-2]):
            leg = engine.prefill(case["ids"], HANDED_OVER)
            found = decoded(decode, leg.params["transfer_id"], len(case["tokens"]))
            matching_steps(found, case["tokens"], case["margins"], MARGIN)
    finally:
        engine.stop()


def test_divided_heads_cannot_be_held(smollm2, decode, tmp_path):
    engine = Vllm(smollm2, tmp_path, {"decode": decode.address, "mode": "hold", "listen": "127.0.0.1:7100"},
                  "--max-model-len", "2048", "--tensor-parallel-size", "3")
    assert "tensor_parallel_size" in engine.refusal()
