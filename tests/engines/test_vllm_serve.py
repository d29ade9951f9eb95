"""A real vLLM computes prompts, and the decode node goes on with its caches: nothing is lost, whatever dies."""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import requests
from engine_lab import HANDED_OVER, Vllm, decoded
from sluice.v1 import admin_pb2, decode_pb2, ingest_pb2
from support.nodes import Node, greedy, matching_steps, tokens_of

# vLLM computes in bf16, so that a step whose margin is smaller may choose another token.
MARGIN = 0.2
TOKENS = 48


def handed_over(vllm, decode, prompt, tokens=TOKENS):
    """Returns the output of a prompt that vLLM computes and the node goes on with."""
    leg = vllm.prefill(prompt, HANDED_OVER)
    assert leg.params["connector"] == "SluiceConnector" and leg.params["decode"] == decode.address, leg
    ids = decoded(decode, leg.params["transfer_id"], tokens)
    assert ids[:1] == leg.tokens
    return ids


def test_every_golden_prompt_goes_on_with_its_tokens(vllm, decode, chats):
    for case in chats:
        found = handed_over(vllm, decode, case["ids"], len(case["tokens"]))
        matching_steps(found, case["tokens"], case["margins"], MARGIN)


def test_the_node_goes_on_as_vllm_would(vllm, decode, chats):
    """Prompts of one block, of whole blocks, of a token more, and of 4K in 16 chunks."""
    text = chats[-1]["ids"]
    for length in (1, 31, 32, 33, 256, 257, 2999):
        prompt = text[:length]
        alone = vllm.prefill(prompt, tokens=16).tokens
        assert handed_over(vllm, decode, prompt, 16)[:4] == alone[:4], length
    prompt = (text + chats[-2]["ids"] + text)[:4096]
    assert handed_over(vllm, decode, prompt, 4)[:2] == vllm.prefill(prompt, tokens=4).tokens[:2]


def test_16_prompts_at_once(vllm, decode, chats):
    prompts = [chats[-1]["ids"][i * 40:i * 40 + 300 + 17 * i] for i in range(16)]
    with ThreadPoolExecutor(16) as callers:
        together = list(callers.map(lambda prompt: handed_over(vllm, decode, prompt, 8), prompts))
    for prompt, ids in zip(prompts, together):
        # The batch changes vLLM's rounding, and with it may change a token, but hardly the first ones.
        assert ids[0] == vllm.prefill(prompt).tokens[0] and len(ids) == 8


def test_what_vllms_prefix_cache_has_is_sent_too(vllm, decode, chats):
    prompt = chats[-1]["ids"][:1500]
    first = handed_over(vllm, decode, prompt, 12)
    hits = vllm.metric("vllm:prefix_cache_hits_total")
    assert handed_over(vllm, decode, prompt, 12) == first
    assert vllm.metric("vllm:prefix_cache_hits_total") >= hits + 1400


def test_other_requests_are_vllms_own(vllm, decode, chats):
    leg = vllm.prefill(chats[0]["ids"], tokens=5)
    assert leg.params is None and len(leg.tokens) == 5
    assert vllm.prefill(chats[0]["ids"], {"do_remote_decode": False}).params is None


def test_the_decode_leg_may_come_first(vllm, decode, chats):
    key = {"rendezvous_key": "room-1"}
    with ThreadPoolExecutor(1) as callers:
        call = callers.submit(lambda: tokens_of(decode.decode.Generate(decode_pb2.GenerateRequest(
            rendezvous_key="room-1", sampling=greedy(max_tokens=9, ignore_eos=True)), timeout=60)))
        time.sleep(0.2)
        vllm.prefill(chats[1]["ids"], HANDED_OVER | key)
        assert [t.id for t in call.result()[0]] == chats[1]["tokens"][:9]


@pytest.mark.parametrize("params, words", [
    ({"decode": "127.0.0.1:1"}, "kv_transfer_params.decode"),
    ({"max_new_tokens": 0}, "kv_transfer_params.max_new_tokens"),
    ({"max_new_tokens": "9"}, "kv_transfer_params.max_new_tokens"),
    ({"tenant": 3}, "kv_transfer_params.tenant"),
    ({"nonsense": 1}, "kv_transfer_params.nonsense"),
    ({"do_remote_prefill": True}, "kv_transfer_params.do_remote_prefill"),
])
def test_a_wrong_wish_is_named_and_the_prompt_is_computed(vllm, decode, chats, params, words):
    leg = vllm.prefill(chats[0]["ids"], HANDED_OVER | params)
    assert words in leg.params["error"] and "transfer_id" not in leg.params
    assert leg.tokens[0] == chats[0]["tokens"][0]


def test_a_prompt_waits_for_room_and_then_goes_without(vllm, decode, chats):
    """A stranger's transfer fills DRAM. vLLM's own requests go on meanwhile."""
    model = decode.admin.GetModel(admin_pb2.GetModelRequest()).model
    held, size = [], 8000
    try:
        while size > 64:
            manifest = ingest_pb2.Manifest(model_fingerprint=model.fingerprint, context_length=size,
                                           prompt_token_ids=[1] * size, max_new_tokens=100)
            try:
                held.append(decode.ingest.Reserve(ingest_pb2.ReserveRequest(manifest=manifest)).transfer_id)
            except grpc.RpcError:
                size //= 2
        assert held
        with ThreadPoolExecutor(2) as callers:
            waits = callers.submit(vllm.prefill, chats[-1]["ids"], HANDED_OVER)
            time.sleep(0.5)
            assert vllm.prefill(chats[0]["ids"], tokens=3).seconds < 4.5
            assert not waits.done()
            leg = waits.result()
        assert "DRAM" in leg.params["error"], leg
        assert 4.5 < leg.seconds < 40
        # Room that comes in time is taken.
        with ThreadPoolExecutor(1) as callers:
            waits = callers.submit(vllm.prefill, chats[1]["ids"] * 20, HANDED_OVER)
            time.sleep(1)
            for transfer_id in held:
                decode.ingest.Abort(ingest_pb2.AbortRequest(transfer_id=transfer_id))
            leg = waits.result()
        assert len(decoded(decode, leg.params["transfer_id"], 3)) == 3
    finally:
        for transfer_id in held:
            decode.ingest.Abort(ingest_pb2.AbortRequest(transfer_id=transfer_id))


def test_a_node_that_stands_still_holds_nobody_else_up(vllm, decode, chats):
    os.kill(decode.process.pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as callers:
            waits = callers.submit(vllm.prefill, chats[2]["ids"], HANDED_OVER)
            time.sleep(0.5)
            assert vllm.prefill(chats[0]["ids"], tokens=3).seconds < 5
            os.kill(decode.process.pid, signal.SIGCONT)
            leg = waits.result()
    finally:
        os.kill(decode.process.pid, signal.SIGCONT)
    found = decoded(decode, leg.params["transfer_id"], len(chats[2]["tokens"]))
    matching_steps(found, chats[2]["tokens"], chats[2]["margins"], MARGIN)


def test_a_caller_that_hangs_up_leaves_nothing(vllm, decode, chats):
    """memory_comes_back checks the node; vLLM's blocks come back too."""
    prompt = chats[-1]["ids"] + chats[-2]["ids"]
    for _ in range(4):
        with contextlib.suppress(requests.ReadTimeout):
            vllm.prefill(prompt[7:], HANDED_OVER, timeout=0.4)
    deadline = time.monotonic() + 60
    while vllm.metric("vllm:kv_cache_usage_perc") > 0 or vllm.metric("vllm:num_requests_running") > 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_vllm_is_killed_in_the_middle(smollm2, decode, chats, tmp_path):
    """The waiting decode leg ends with the transfer's lease, or computes the prompt itself if it brings it."""
    engine = Vllm(smollm2, tmp_path, {"decode": decode.address}, "--max-model-len", "8192",
                  "--max-num-batched-tokens", "64").wait()
    prompt = chats[-1]["ids"]
    try:
        def leg():
            with contextlib.suppress(requests.ConnectionError):
                engine.prefill(prompt, HANDED_OVER | {"rendezvous_key": "killed"})
        caller = threading.Thread(target=leg)
        caller.start()
        deadline = time.monotonic() + 60
        while not decode.capacity().transfers:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.5)
    finally:
        engine.kill()
    caller.join()
    call = decode.decode.Generate(decode_pb2.GenerateRequest(
        rendezvous_key="killed", prompt_token_ids=prompt, sampling=greedy(max_tokens=16, ignore_eos=True)), timeout=120)
    found = [t.id for t in tokens_of(call)[0]]
    matching_steps(found, chats[-1]["tokens"][:16], chats[-1]["margins"], MARGIN)


def test_a_node_that_dies_costs_vllm_nothing(smollm2, vllm, decode, chats, tmp_path):
    doomed = Node("sluice-server", smollm2, tmp_path, "--hbm-bytes", "256MiB", "--dram-bytes", "256MiB")
    engine = Vllm(smollm2, tmp_path, {"decode": doomed.address, "reserve_seconds": 1}, "--max-model-len", "8192",
                  "--max-num-batched-tokens", "64").wait()
    try:
        with ThreadPoolExecutor(1) as callers:
            waits = callers.submit(engine.prefill, chats[-1]["ids"], HANDED_OVER)
            while not doomed.capacity().transfers:
                time.sleep(0.01)
            doomed.process.kill()
            assert waits.result().tokens[0] == chats[-1]["tokens"][0]
        doomed.process.wait()
        assert len(engine.prefill(chats[0]["ids"], tokens=5).tokens) == 5
        leg = engine.prefill(chats[0]["ids"], HANDED_OVER)
        assert doomed.address in leg.params["error"] and leg.seconds < 20
        deadline = time.monotonic() + 90
        while engine.metric("vllm:kv_cache_usage_perc") > 0:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        engine.stop()
        doomed.channel.close()


def test_another_model_is_refused_by_name(smollm2, tiny_node, tmp_path, chats):
    engine = Vllm(smollm2, tmp_path, {"decode": tiny_node.address, "reserve_seconds": 1}, "--max-model-len", "2048")
    try:
        leg = engine.wait().prefill(chats[0]["ids"], HANDED_OVER)
        assert "another model" in leg.params["error"] and "number of layers" in leg.params["error"]
    finally:
        engine.stop()


@pytest.mark.parametrize("extra, flags, words", [
    ({}, [], "kv_connector_extra_config.decode"),
    ({"decode": "127.0.0.1:7000", "lease": 3}, [], "kv_connector_extra_config.lease"),
    ({"decode": "127.0.0.1:7000"}, ["--kv-cache-dtype", "fp8"], "kv-cache-dtype"),
])
def test_what_cannot_be_sent_is_refused_at_the_start(smollm2, tmp_path, extra, flags, words):
    engine = Vllm(smollm2, tmp_path, extra, *flags)
    assert words in engine.refusal()
    assert engine.process.returncode != 0
