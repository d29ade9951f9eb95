"""The connector for vLLM: what it asks for, what it sends, and that no end of a request leaves anything behind."""

import threading
import time

import grpc
import ml_dtypes
import numpy as np
import pytest
import vllm_stand_in as stand_in
from fake_node import BLOCK, DIM, HEADS, LAYERS, FakeNode
from sluice_client.pusher import Pusher

stand_in.install()

from sluice_client.vllm_connector import SluiceConnector  # noqa: E402
from sluice_client.vllm_connector.engine import check_engine  # noqa: E402
from sluice_client.vllm_connector.settings import read_settings, read_wish  # noqa: E402

ASKED = {"do_remote_decode": True}


def engine_of(node, ranks=1, **extra):
    made = stand_in.Engine(SluiceConnector, {"decode": node.address, "reserve_seconds": 1} | extra, LAYERS, HEADS, DIM,
                           ranks=ranks)
    return made


def random_kv(tokens, seed=1):
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal((tokens, HEADS, DIM)).astype(np.float32) for _ in range(2)] for _ in range(LAYERS)]


def admitted(engine, request, seconds=5.0):
    """Waits as vLLM's scheduler does until a request may run."""
    deadline = time.monotonic() + seconds
    while engine.scheduler.get_num_new_matched_tokens(request, 0) == (None, False):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def until(true, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def sent(engine, request_id):
    """Runs empty steps until all ranks have sent a request."""
    until(lambda: request_id in engine.step())


def check_landed(node, kv, tokens):
    """Checks that every block at the node is K, then V, of its head in bfloat16."""
    assert len(node.blocks) == LAYERS * HEADS * -(-tokens // BLOCK)
    for (layer, head, first), data in node.blocks.items():
        end = min(first + BLOCK, tokens)
        assert data == b"".join(a[first:end, head].astype(ml_dtypes.bfloat16).tobytes() for a in kv[layer])


def run(engine, request_id, tokens, chunks, *, computed=0, params=ASKED, seed=1):
    """Runs a prompt in chunks. Returns the request and its caches."""
    kv, request = random_kv(tokens, seed), engine.request(request_id, list(range(tokens)), params)
    admitted(engine, request)
    blocks = engine.blocks(tokens)
    engine.store(blocks, kv, 0, computed)  # what a prefix cache has
    begin = computed
    for i, size in enumerate(chunks):
        end = begin + size
        have = -(-end // engine.BLOCK)
        had = 0 if i == 0 else -(-begin // engine.BLOCK)
        piece = (request_id, blocks[had:have], begin, size, lambda b=begin, e=end: engine.store(blocks, kv, b, e))
        engine.step(**{"new" if i == 0 else "cached": [piece]})
        begin = end
    assert begin == tokens
    return request, kv


@pytest.mark.parametrize("tokens, chunks, computed", [
    (1, [1], 0), (16, [16], 0), (37, [37], 0), (37, [5, 5, 20, 7], 0), (80, [3, 16, 61], 0), (100, [20, 48], 32),
    (33, [1], 32)])
def test_every_token_lands_once_computed(node, tokens, chunks, computed):
    engine = engine_of(node)
    request, kv = run(engine, "r", tokens, chunks, computed=computed)
    request.output_token_ids = [42]
    assert node.committed is None
    keep, params = engine.scheduler.request_finished(request, [])
    assert keep and params == {"connector": "SluiceConnector", "transfer_id": "ab" * 16, "decode": node.address}
    assert engine.scheduler.has_pending_push_work()
    sent(engine, "r")
    until(lambda: node.committed is not None)
    check_landed(node, kv, tokens)
    assert [t.id for t in node.committed.first_tokens] == [42]
    assert node.manifest.context_length == tokens and node.aborted is None
    assert not engine.scheduler.has_pending_push_work()


def test_no_more_first_tokens_are_handed_over_than_a_node_takes(node):
    engine = engine_of(node)
    request, _ = run(engine, "r", 9, [9])
    request.output_token_ids = list(range(40))
    engine.scheduler.request_finished(request, [])
    sent(engine, "r")
    until(lambda: node.committed is not None)
    assert [t.id for t in node.committed.first_tokens] == list(range(16))


def test_ranks_send_their_own_heads(node):
    engine = engine_of(node, ranks=3)
    request, kv = run(engine, "r", 37, [20, 17])
    engine.scheduler.request_finished(request, [])
    sent(engine, "r")
    until(lambda: node.committed is not None)
    check_landed(node, kv, 37)


def test_damaged_chunks_and_broken_streams_are_sent_again(node):
    node.damage, node.breaks = 2, 1
    engine = engine_of(node, streams=2)
    request, kv = run(engine, "r", 80, [80])
    engine.scheduler.request_finished(request, [])
    sent(engine, "r")
    until(lambda: node.committed is not None)
    check_landed(node, kv, 80)


def test_requests_that_do_not_ask_are_vllms_own(node):
    engine = engine_of(node)
    for params in (None, {}, {"do_remote_decode": False}):
        request = engine.request("r", [1, 2], params)
        assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        assert engine.scheduler.request_finished(request, []) == (False, None)
    assert node.manifest is None and not engine.scheduler.has_pending_push_work()


def test_with_hand_over_all_every_request_but_a_warm_up_is_handed_over(node):
    engine = engine_of(node, hand_over="all")
    assert engine.scheduler.get_num_new_matched_tokens(engine.request("smg-warmup-1", [1]), 0) == (0, False)
    assert engine.scheduler.get_num_new_matched_tokens(engine.request("n", [1], {"do_remote_decode": False}), 0)[0] == 0
    assert node.manifest is None
    run(engine, "r", 5, [5], params=None)
    assert node.manifest.context_length == 5


@pytest.fixture
def stubborn():
    """A node whose Reserve the test may replace."""
    class Stubborn(FakeNode):
        def Reserve(self, request, context):
            return self.reserve(request, context) if hasattr(self, "reserve") else super().Reserve(request, context)
    node = Stubborn()
    yield node
    node.server.stop(None)


def refusing(node, code, times):
    left = [times]

    def reserve(request, context):
        if left[0] > 0:
            left[0] -= 1
            context.abort(code, "no room")
        return FakeNode.Reserve(node, request, context)
    node.reserve = reserve
    return left


def test_a_prompt_waits_until_there_is_room(stubborn):
    left = refusing(stubborn, grpc.StatusCode.RESOURCE_EXHAUSTED, 2)
    engine = engine_of(stubborn, reserve_seconds=5)
    request = engine.request("r", list(range(9)), ASKED)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    admitted(engine, request)
    assert left == [0] and stubborn.manifest.context_length == 9


def test_a_lease_is_kept_while_the_prompt_is_computed(stubborn, monkeypatch):
    """The decode node may have most of a prompt, of which nothing is sent then."""
    renewed = []

    def reserve(request, context):
        answer = FakeNode.Reserve(stubborn, request, context)
        answer.lease.FromMilliseconds(50)
        return answer
    stubborn.reserve = reserve
    monkeypatch.setattr(Pusher, "renew", lambda pusher, real=Pusher.renew: (renewed.append(1), real(pusher)))
    engine = engine_of(stubborn)
    kv, request = random_kv(20), engine.request("r", list(range(20)), ASKED)
    admitted(engine, request)
    until(lambda: engine.step() is not None and len(renewed) >= 3)
    blocks = engine.blocks(20)
    engine.step(new=[("r", blocks, 0, 20, lambda: engine.store(blocks, kv, 0, 20))])
    request.output_token_ids = [42]
    engine.scheduler.request_finished(request, [])
    sent(engine, "r")
    until(lambda: stubborn.committed is not None)
    assert [t.id for t in stubborn.committed.first_tokens] == [42]


@pytest.mark.parametrize("code, waits", [(grpc.StatusCode.RESOURCE_EXHAUSTED, True),
                                         (grpc.StatusCode.INVALID_ARGUMENT, False)])
def test_without_room_the_prompt_runs_and_its_answer_says_why(stubborn, code, waits):
    refusing(stubborn, code, 1 << 30)
    engine = engine_of(stubborn, reserve_seconds=0.5)
    begun = time.monotonic()
    request, _ = run(engine, "r", 9, [9])
    assert (time.monotonic() - begun > 0.45) == waits
    keep, params = engine.scheduler.request_finished(request, [])
    assert not keep and params["connector"] == "SluiceConnector" and "no room" in params["error"]
    assert not engine.scheduler.has_pending_push_work() and not stubborn.blocks


def test_a_node_that_is_gone_is_named():
    engine = stand_in.Engine(SluiceConnector, {"decode": "127.0.0.1:1", "reserve_seconds": 0.2}, LAYERS, HEADS, DIM)
    request, _ = run(engine, "r", 9, [9])
    assert "127.0.0.1:1" in engine.scheduler.request_finished(request, [])[1]["error"]


def test_another_model_is_named(node):
    engine = engine_of(node, fingerprint="another")
    request, _ = run(engine, "r", 9, [9])
    assert "fingerprint" in engine.scheduler.request_finished(request, [])[1]["error"]


@pytest.mark.parametrize("shape, words", [((HEADS + 1, DIM), "KV heads"), ((HEADS, DIM + 1), "head_dim")])
def test_a_model_of_another_shape_is_named(node, shape, words):
    vllm_config, cache_config = stand_in.config(LAYERS, {"decode": node.address})
    for spec in cache_config.kv_cache_groups[0].kv_cache_spec.kv_cache_specs.values():
        spec.num_kv_heads, spec.head_size = shape
    scheduler = SluiceConnector(vllm_config, stand_in.KVConnectorRole.SCHEDULER, cache_config)
    request = stand_in.Engine.request("r", [1], ASKED)
    until(lambda: scheduler.get_num_new_matched_tokens(request, 0) == (0, False))
    error = scheduler.request_finished(request, [])[1]["error"]
    assert "another model" in error and words in error


def test_a_preempted_prompt_begins_anew(node):
    engine = engine_of(node)
    kv, request = random_kv(40), engine.request("r", list(range(40)), ASKED)
    admitted(engine, request)
    blocks = engine.blocks(40)
    engine.step(new=[("r", blocks[:2], 0, 32, lambda: engine.store(blocks, kv, 0, 32))])
    until(lambda: node.blocks)
    engine.step(preempted=["r"])
    until(lambda: node.aborted is not None)
    # Its old blocks are another's now.
    for cache in engine.caches[0].values():
        cache[blocks] = -1
    node.blocks.clear()
    node.aborted, node.manifest = None, None
    admitted(engine, request)
    again = engine.blocks(40)
    engine.step(cached=[("r", again, 0, 40, lambda: engine.store(again, kv, 0, 40))], resumed=["r"])
    engine.scheduler.request_finished(request, [])
    sent(engine, "r")
    until(lambda: node.committed is not None)
    check_landed(node, kv, 40)
    assert node.aborted is None


@pytest.mark.parametrize("when", ["reserving", "reserved", "half", "whole"])
def test_a_request_that_dies_is_aborted(stubborn, when):
    gate, before = threading.Event(), set(threading.enumerate())
    if when == "reserving":
        stubborn.reserve = lambda request, context: gate.wait(5) and FakeNode.Reserve(stubborn, request, context)
    engine = engine_of(stubborn)
    kv, request = random_kv(40), engine.request("r", list(range(40)), ASKED)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0)[0] is None
    if when != "reserving":
        admitted(engine, request)
    if when in ("half", "whole"):
        blocks, end = engine.blocks(40), 20 if when == "half" else 40
        engine.step(new=[("r", blocks, 0, end, lambda: engine.store(blocks, kv, 0, end))])
    if when == "whole":
        # vLLM keeps the blocks of a request that is done; the node may die under it.
        stubborn.server.stop(None).wait()
        assert engine.scheduler.request_finished(request, [])[0]
        until(lambda: "r" in engine.step(), 30)
    else:
        assert engine.scheduler.request_finished(request, []) == (False, None)
        gate.set()
        until(lambda: stubborn.aborted is not None)
        engine.step()
    assert not engine.scheduler.has_pending_push_work()
    assert not [t for t in set(threading.enumerate()) - before if t.name == "sluice-sender"]


def test_shutdown_aborts_what_is_open(node):
    engine = engine_of(node)
    run(engine, "r", 9, [9])
    engine.scheduler.shutdown()
    engine.ranks[0].shutdown()
    assert node.aborted is not None and "shuts down" in node.aborted.reason


@pytest.mark.parametrize("fields, words", [
    ({"lora_request": object()}, "LoRA"), ({"mm_features": [1]}, "images"), ({"prompt_token_ids": None}, "embeddings")])
def test_what_the_node_cannot_go_on_with_is_named(node, fields, words):
    engine = engine_of(node)
    request = engine.request("r", [1], ASKED)
    request.__dict__.update(fields)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert words in engine.scheduler.request_finished(request, [])[1]["error"]


@pytest.mark.parametrize("extra, words", [
    ({}, "decode"), ({"decode": ""}, "decode"), ({"decode": 7000}, "decode"), ({"decode": "nohost"}, "host:port"),
    ({"decode": "a:1", "other": 1}, "other"), ({"decode": "a:1", "streams": 0}, "streams"),
    ({"decode": "a:1", "streams": True}, "streams"), ({"decode": "a:1", "max_new_tokens": "9"}, "max_new_tokens"),
    ({"decode": "a:1", "reserve_seconds": -1}, "reserve_seconds"), ({"decode": "a:1", "hand_over": "some"}, "hand_over"),
    ({"decode": "a:1", "cert": "x"}, "--cert"), ({"decode": "a:1", "ca": "/nowhere"}, "/nowhere")])
def test_wrong_settings_are_named(extra, words):
    with pytest.raises(ValueError, match="kv_connector_extra_config") as error:
        read_settings(extra)
    assert words in str(error.value)


def test_a_request_may_name_one_of_several_nodes():
    settings = read_settings({"decode": "a:1, b:2", "tenant": "t"})
    assert read_wish(ASKED, settings).decode == "a:1"
    wish = read_wish(ASKED | {"decode": "b:2", "max_new_tokens": 7, "remote_host": None}, settings)
    assert (wish.decode, wish.max_new_tokens, wish.tenant) == ("b:2", 7, "t")
    with pytest.raises(ValueError, match="kv_transfer_params.decode"):
        read_wish(ASKED | {"decode": "c:3"}, settings)


@pytest.mark.parametrize("changed, words", [
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"), ({"decode_context_parallel_size": 2}, "context_parallel"),
    ({"dtype": "fp8_e4m3"}, "--kv-cache-dtype"),
    ({"specs": {"model.layers.0.x": stand_in.spec("SlidingWindowSpec")}}, "SlidingWindowSpec"),
    ({"specs": {"model.layers.0.x": stand_in.spec("MambaSpec")}}, "MambaSpec"),
    ({"specs": {"model.layers.0.x": stand_in.spec("FullAttentionSpec", sliding_window=64)}}, "sliding window")])
def test_engines_whose_caches_cannot_be_sent_are_refused(changed, words):
    with pytest.raises(ValueError, match="SluiceConnector") as error:
        check_engine(*stand_in.config(1, {}, **changed))
    assert words in str(error.value)
    two = stand_in.config(1, {})
    two[1].kv_cache_groups *= 2
    with pytest.raises(ValueError, match="disable-hybrid-kv-cache-manager"):
        check_engine(*two)
