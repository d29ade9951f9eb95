"""Decode legs of vLLM's connector: a prompt that it pushed, and one that it could not hand over."""

import json

import grpc
import pytest
from support.metrics_text import Scrape
from support.nodes import error_of
from support.transfers import committed
from support.vllm_client import generate

GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
SIZES = ["--hbm-bytes", "64MiB", "--dram-bytes", "64MiB"]


def leg(node, prompt, **params):
    text = json.dumps({"connector": "SluiceConnector", **params})
    return generate(node, prompt, GREEDY, kv_transfer_params_json=text)


@pytest.fixture(scope="module", params=["never", "on_failure"])
def node(request, tiny_models, start):
    made = start("sluice-server", tiny_models("tiny-llama"), *SIZES, "--local-prefill", request.param)
    made.mode = request.param
    return made


def test_a_pushed_prompt_goes_on(node, golden):
    g = golden("tiny-llama")
    transfer_id = committed(node, g)
    found = leg(node, g.prompt(1), decode=node.address, transfer_id=transfer_id)
    assert list(found.complete.output_ids) == g.tokens(1)[:8]
    assert Scrape(node).get("sluice_local_prefills_total") == 0


def test_a_prompt_that_was_not_handed_over(node, golden):
    """A node that may computes it, and says so in its counter; another refuses with the prefill node's words."""
    g = golden("tiny-llama")
    if node.mode == "never":
        error = error_of(lambda: leg(node, g.prompt(1), error="no room in time"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "no room in time" in error.details()
        return
    assert list(leg(node, g.prompt(1), error="no room in time").complete.output_ids) == g.tokens(1)[:8]
    assert Scrape(node).get("sluice_local_prefills_total") == 1
    assert "no room in time" in node.log.read_text()
