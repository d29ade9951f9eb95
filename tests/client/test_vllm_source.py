"""A vLLM that holds its prompts: decode nodes read them, and vLLM gets its blocks back whatever they do."""

import socket
import threading
import time

import google_crc32c
import grpc
import ml_dtypes
import pytest
import vllm_stand_in as stand_in
from fake_node import BLOCK, DIM, HEADS, LAYERS
from sluice.v1 import ingest_pb2, source_pb2, source_pb2_grpc
from sluice_client import rpc
from test_vllm_connector import ASKED, run, until

stand_in.install()

from sluice_client.hand_off.caches import LayerCache  # noqa: E402
from sluice_client.vllm_connector import SluiceConnector  # noqa: E402


@pytest.fixture
def holding(node):
    """start(**extra) -> (engine, stub of its source)."""
    made = []

    def start(**extra):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{s.getsockname()[1]}"
        engine = stand_in.Engine(SluiceConnector, {"decode": node.address, "mode": "hold", "listen": address} | extra,
                                 LAYERS, HEADS, DIM)
        channel = rpc.open_channel(address)
        made.append((engine, channel))
        return engine, source_pb2_grpc.KvSourceStub(channel)

    yield start
    for engine, channel in made:
        channel.close()
        engine.ranks[0].shutdown()
        engine.scheduler.shutdown()


def held(engine, tokens=37, chunks=(20, 17), **params):
    """Returns what the router passes on of a prompt that vLLM has computed, and its caches."""
    request, kv = run(engine, "r", tokens, list(chunks), params=ASKED | params)
    keep, ref = engine.scheduler.request_finished(request, [])
    assert keep and engine.scheduler.has_pending_push_work()
    assert engine.step() == set()
    return ref, kv


def blocks_of(answers):
    """Returns (layer, head, first token) -> bytes of a Read."""
    found = {}
    for answer in answers:
        h, at = answer.header, 0
        assert h.crc32c == google_crc32c.value(answer.payload)
        for first in range(h.token_begin, h.token_end, BLOCK):
            size = min(BLOCK, h.token_end - first) * 2 * DIM * 2
            for head in range(h.head_begin, h.head_end):
                found[h.layer, head, first] = answer.payload[at:at + size]
                at += size
    return found


def expected(kv, tokens):
    return {(layer, head, first): b"".join(a[first:min(first + BLOCK, tokens), head].astype(ml_dtypes.bfloat16).tobytes()
                                           for a in kv[layer])
            for layer in range(LAYERS) for head in range(HEADS) for first in range(0, tokens, BLOCK)}


def test_a_reader_gets_everything_and_releases_it(node, holding):
    engine, stub = holding()
    ref, kv = held(engine)
    described = stub.Describe(source_pb2.DescribeRequest(source_id=ref["source_id"]))
    assert described.prompt_digest == ref["prompt_digest"] and described.context_length == 37
    assert described.model_fingerprint == "f1" and list(described.cache_kinds) == [node.kind]
    assert 50 < described.lease_left.seconds <= 60
    read = blocks_of(stub.Read(source_pb2.ReadRequest(source_id=ref["source_id"])))
    assert read == expected(kv, 37)
    small = list(stub.Read(source_pb2.ReadRequest(source_id=ref["source_id"], max_chunk_bytes=1)))
    assert len(small) == LAYERS * 5 and blocks_of(small) == read
    assert stub.Release(source_pb2.ReleaseRequest(source_id=ref["source_id"])).found
    assert not stub.Release(source_pb2.ReleaseRequest(source_id=ref["source_id"])).found
    until(lambda: "r" in engine.step())
    assert not engine.scheduler.has_pending_push_work()
    with pytest.raises(grpc.RpcError) as error:
        stub.Describe(source_pb2.DescribeRequest(source_id=ref["source_id"]))
    assert rpc.reason_of(error.value) == "SOURCE_NOT_FOUND"


def test_ranges_are_sent_alone_and_wrong_ones_are_named(holding):
    engine, stub = holding()
    ref, kv = held(engine)

    def read(**r):
        wanted = ingest_pb2.BlockRange(**({"layer": 0, "kind": "kv", "head_end": 1, "token_end": 8} | r))
        return list(stub.Read(source_pb2.ReadRequest(source_id=ref["source_id"], ranges=[wanted], max_chunk_bytes=1)))

    found = read(layer=1, token_begin=9, token_end=17)
    assert [(a.header.layer, a.header.token_begin, a.header.token_end) for a in found] == [(1, 8, 16), (1, 16, 24)]
    for wrong in ({"layer": 9}, {"kind": "other"}, {"head_end": 9}, {"head_end": 0}, {"token_end": 38}, {"token_end": 0}):
        with pytest.raises(grpc.RpcError) as error:
            read(**wrong)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "ranges[0]" in error.value.details()


def test_a_prompt_nobody_reads_goes_with_its_lease(holding):
    engine, stub = holding(hold_seconds=1)
    ref, _ = held(engine)
    begun = time.monotonic()
    until(lambda: "r" in engine.step())
    assert time.monotonic() - begun > 0.8
    with pytest.raises(grpc.RpcError):
        list(stub.Read(source_pb2.ReadRequest(source_id=ref["source_id"])))


def test_renew_and_read_prolong_the_lease(holding):
    engine, stub = holding(hold_seconds=1)
    ref, _ = held(engine)
    for _ in range(5):
        time.sleep(0.4)
        stub.Renew(source_pb2.RenewRequest(source_id=ref["source_id"]))
        assert engine.step() == set()
    until(lambda: "r" in engine.step())


def test_blocks_stay_while_a_reader_is_there(holding, monkeypatch):
    engine, stub = holding()
    ref, kv = held(engine)
    reading, gate, read = threading.Event(), threading.Event(), LayerCache.read

    def slow(cache, kind, blocks, begin, *rest):
        if begin > 0:
            reading.set()
            assert gate.wait(10)
        return read(cache, kind, blocks, begin, *rest)
    monkeypatch.setattr(LayerCache, "read", slow)
    call = stub.Read(source_pb2.ReadRequest(source_id=ref["source_id"], max_chunk_bytes=1))
    first = next(call)
    assert reading.wait(10)
    stub.Release(source_pb2.ReleaseRequest(source_id=ref["source_id"]))
    for _ in range(3):
        assert engine.step() == set()
    gate.set()
    with pytest.raises(grpc.RpcError) as error:  # it is told that the prompt has gone, and leaves
        list(call)
    assert error.value.code() is grpc.StatusCode.NOT_FOUND and first.header.layer == 0
    until(lambda: "r" in engine.step())


def test_a_request_that_dies_gives_its_blocks_back_at_once(holding):
    engine, stub = holding()
    request, _ = run(engine, "r", 37, [37])
    engine.scheduler._hand_offs._live["r"].planned = 0  # as of a request that ends in mid-prompt
    source_id = engine.scheduler._hand_offs._live["r"].held.source_id
    assert engine.scheduler.request_finished(request, []) == (False, None)
    engine.step()
    with pytest.raises(grpc.RpcError) as error:
        stub.Describe(source_pb2.DescribeRequest(source_id=source_id))
    assert rpc.reason_of(error.value) == "SOURCE_NOT_FOUND"


def test_another_tenants_reader_finds_nothing(holding):
    engine, stub = holding()
    ref, _ = held(engine, tenant="a")
    for tenant in ("", "b"):
        with pytest.raises(grpc.RpcError):
            stub.Describe(source_pb2.DescribeRequest(source_id=ref["source_id"], tenant=tenant))
        assert not stub.Release(source_pb2.ReleaseRequest(source_id=ref["source_id"], tenant=tenant)).found
    assert stub.Release(source_pb2.ReleaseRequest(source_id=ref["source_id"], tenant="a")).found


@pytest.mark.parametrize("extra, words", [
    ({}, "listen"), ({"listen": "7100"}, "host:port"), ({"listen": "256.0.0.1:1"}, "listen"),
    ({"listen": "127.0.0.1:1", "mode": "keep"}, "mode")])
def test_wrong_settings_are_named(node, extra, words):
    with pytest.raises(ValueError, match="kv_connector_extra_config") as error:
        stand_in.Engine(SluiceConnector, {"decode": node.address, "mode": "hold"} | extra, LAYERS, HEADS, DIM)
    assert words in str(error.value)


def test_ranks_that_divide_heads_cannot_hold(node):
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        stand_in.Engine(SluiceConnector, {"decode": node.address, "mode": "hold", "listen": "127.0.0.1:0"}, LAYERS, HEADS,
                        DIM, ranks=3)
