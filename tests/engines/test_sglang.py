"""A real SGLang computes prompts, and the decode node goes on with its caches. Both legs have the room alone in common."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from engine_lab import ENGINES, Sglang, decoded
from support.nodes import matching_steps, run

MARGIN = 0.2  # as in test_vllm_serve.py
ROOMS = itertools.count(1)
# On a CPU, SGLang's overlapped steps cannot send cached prefixes early: that takes a CUDA event.
OVERLAPPED = {"environment": {"SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"}}


@pytest.fixture(scope="module")
def model(smollm2):
    if not (ENGINES / "sglang/bin/python").exists():
        pytest.skip("no SGLang: tools/test --engines installs it")
    return smollm2


@pytest.fixture(scope="module", params=["overlapped steps", "steps one by one, pages of 16"])
def sglang(model, decode, tmp_path_factory, request):
    """SGLang with the backend. It computes prompts in chunks of 256 tokens."""
    flags = ["--chunked-prefill-size", "256"]
    overlapped = request.param.startswith("overlapped")
    if not overlapped:
        flags += ["--disable-overlap-schedule", "--page-size", "16"]
    engine = Sglang(model, tmp_path_factory.mktemp("sglang"), {"decode": decode.address, "reserve_seconds": 3}, *flags,
                    **(OVERLAPPED if overlapped else {}))
    try:
        yield engine.wait()
    finally:
        engine.stop()


def handed_over(sglang, decode, prompt, tokens):
    """Returns the output of a prompt whose legs go out at once, and how many tokens SGLang's prefix cache had."""
    room = next(ROOMS)
    with ThreadPoolExecutor(1) as other:
        output = other.submit(decoded, decode, "", tokens, room=str(room))
        answer = sglang.leg(prompt, room, max_new_tokens=tokens)
        assert answer.status_code == 200, answer.text
        leg = answer.json()
        ids = output.result()
    assert ids[:1] == leg["output_ids"]
    told, = leg["meta_info"]["sluice"]
    assert told["connector"] == "SluiceConnector" and told["decode"] == decode.address and told["transfer_id"]
    return ids, leg["meta_info"]["cached_tokens"]


def test_every_golden_prompt_goes_on_with_its_tokens(sglang, decode, chats):
    for case in chats:
        found, _ = handed_over(sglang, decode, case["ids"], len(case["tokens"]))
        matching_steps(found, case["tokens"], case["margins"], MARGIN)


def test_prompts_of_all_lengths_and_what_the_prefix_cache_has(sglang, decode, chats):
    text = chats[-1]["ids"]
    for length in (1, 31, 32, 33, 256, 257, 1500):
        first, _ = handed_over(sglang, decode, text[:length], 8)
        again, cached = handed_over(sglang, decode, text[:length], 8)
        assert again[:2] == first[:2] and cached >= (length - 1) // 16 * 16, length


def test_16_prompts_at_once(sglang, decode, chats):
    prompts = [chats[-1]["ids"][i * 40:i * 40 + 300 + 17 * i] for i in range(16)]
    with ThreadPoolExecutor(16) as callers:
        together = list(callers.map(lambda prompt: handed_over(sglang, decode, prompt, 8)[0], prompts))
    for prompt, ids in zip(prompts, together):
        # The batch changes SGLang's rounding, and with it may change a token, but hardly the first ones.
        assert ids[0] == handed_over(sglang, decode, prompt, 1)[0][0] and len(ids) == 8


def test_what_cannot_be_handed_over_is_named(sglang, decode):
    answer = sglang.leg([1, 2, 3], next(ROOMS), custom_params={"sluice": {"decode": "nowhere:1"}})
    assert answer.status_code == 500 and "custom_params.sluice.decode" in answer.text
    room = next(ROOMS)
    assert sglang.leg([1, 2, 3], room).status_code == 200
    answer = sglang.leg([1, 2, 3], room)
    assert answer.status_code == 500 and "RENDEZVOUS_KEY_IN_USE" in answer.text
    assert len(decoded(decode, "", 4, room=str(room))) == 4


def test_a_caller_that_hangs_up_leaves_nothing_behind(sglang, decode, chats):
    prompt = list(reversed(chats[-1]["ids"]))
    with pytest.raises(requests.ReadTimeout):
        sglang.leg(prompt, next(ROOMS), timeout=1.5)
    assert len(handed_over(sglang, decode, prompt[:40], 4)[0]) == 4  # and memory_comes_back looks at the node


def test_its_latent_pools_are_read(model):
    done = run(ENGINES / "sglang/bin/python", Path(__file__).parent / "sglang_pools.py", timeout=200)
    assert done.stdout.endswith("both pools are read\n"), done.stderr[-4000:]


def test_another_model_is_named(model, tiny_node, tmp_path):
    engine = Sglang(model, tmp_path, {"decode": tiny_node.address}, "--disable-overlap-schedule")
    try:
        answer = engine.wait().leg([1, 2, 3], 1)
        assert answer.status_code == 500 and "another model" in answer.text
    finally:
        engine.stop()


def test_wrong_settings_end_sglang(model, decode, tmp_path):
    engine = Sglang(model, tmp_path, {"decode": decode.address, "other": 1})
    assert "SGLANG_SLUICE.other" in engine.refusal()
