"""The gateway smg in front of a real vLLM, which prefills, and a decode node: nobody but vLLM's connector knows of both."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_lab import Vllm
from support.nodes import Node, run
from support.router_lab import MODEL, Router


@pytest.fixture(scope="module")
def router(smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gateway")
    node = Node("sluice-server", smollm2, folder, "--hbm-bytes", "512MiB", "--dram-bytes", "512MiB", "--max-sequences",
                "16", "--block-tokens", "32", "--served-model-name", MODEL)
    engine = Vllm(smollm2, folder, {"decode": node.address, "hand_over": "all"}, "--max-model-len", "4096", "--served-model-name", MODEL,
                  grpc=True)
    engine.wait()
    made = Router(smollm2, folder, engine.address, [node.address])
    made.node, made.engine = node, engine
    yield made
    made.stop()
    engine.stop()
    node.stop()


def test_chats_go_on_at_the_decode_node(router, chats):
    cases = [c for c in chats if c["chat"] and min(c["margins"]) > 0.05]
    assert cases
    for case in cases:
        reply = router.ask(case["text"], max_tokens=len(case["tokens"]))
        assert reply.whole and reply.text == case["output"].removesuffix("<|im_end|>"), reply
        streamed = router.ask(case["text"], max_tokens=len(case["tokens"]), stream=True)
        assert streamed.whole and streamed.text == reply.text and streamed.pieces > 3
    # The decode node computed none of these prompts itself.
    status, text = router.node.http("/metrics")
    assert status == 200 and "sluice_local_prefills_total 0" in text


def test_many_at_once(router, chats):
    case = next(c for c in chats if c["chat"])
    with ThreadPoolExecutor(8) as callers:
        replies = list(callers.map(lambda _: router.ask(case["text"], max_tokens=8), range(24)))
    assert all(reply.whole and reply.usage["completion_tokens"] == 8 for reply in replies), replies
