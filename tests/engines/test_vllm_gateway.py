"""The gateway smg in front of a real vLLM, which prefills, and a decode node: nobody but vLLM's connector knows of both."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_lab import Vllm
from support.metrics_text import Scrape
from support.nodes import Node, free_port
from support.router_lab import MODEL, Router


@pytest.fixture(scope="module", params=["push", "hold"])
def router(smollm2, tmp_path_factory, request):
    """The gateway, a vLLM, and a decode node to which it pushes, or two that read what it holds."""
    nodes = []
    for _ in range(1 if request.param == "push" else 2):
        nodes.append(Node("sluice-server", smollm2, tmp_path_factory.mktemp("node"), "--hbm-bytes", "512MiB",
                          "--dram-bytes", "512MiB", "--max-sequences", "16", "--block-tokens", "32",
                          "--served-model-name", MODEL))
    folder = tmp_path_factory.mktemp("gateway")
    extra = {"decode": nodes[0].address, "hand_over": "all"}
    if request.param == "hold":
        extra |= {"mode": "hold", "listen": f"127.0.0.1:{free_port()}"}
    engine = Vllm(smollm2, folder, extra, "--max-model-len", "4096", "--served-model-name", MODEL, grpc=True)
    engine.wait()
    made = Router(smollm2, folder, engine.address, [node.address for node in nodes])
    made.nodes, made.engine = nodes, engine
    yield made
    made.stop()
    engine.stop()
    for node in nodes:
        node.stop()


def test_chats_go_on_at_the_decode_node(router, chats):
    cases = [c for c in chats if c["chat"] and min(c["margins"]) > 0.05]
    assert cases
    for case in cases:
        reply = router.ask(case["text"], max_tokens=len(case["tokens"]))
        assert reply.whole and reply.text == case["output"].removesuffix("<|im_end|>"), reply
        streamed = router.ask(case["text"], max_tokens=len(case["tokens"]), stream=True)
        assert streamed.whole and streamed.text == reply.text and streamed.pieces > 3
    for node in router.nodes:  # Each has had its part, and computed no prompt itself.
        scrape = Scrape(node)
        assert scrape.get("sluice_local_prefills_total") == 0 and scrape.get("sluice_decoded_tokens_total") > 0
        assert not node.capacity().transfers


def test_many_at_once(router, chats):
    case = next(c for c in chats if c["chat"])
    with ThreadPoolExecutor(8) as callers:
        replies = list(callers.map(lambda _: router.ask(case["text"], max_tokens=8), range(24)))
    assert all(reply.whole and reply.usage["completion_tokens"] == 8 for reply in replies), replies
