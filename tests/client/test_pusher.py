"""The pusher packs the layout of the host KV cache byte for byte, and sends again what is lost."""

import grpc
import ml_dtypes
import numpy as np
import pytest
from fake_node import BLOCK, DIM, HEADS, LAYERS, FakeNode
from sluice.v1 import common_pb2, ingest_pb2
from sluice_client import layout
from sluice_client.pusher import Pusher, PushError

TOKENS = 5 * BLOCK + 3


def arrays(seed=1, tokens=TOKENS, dtype=ml_dtypes.bfloat16):
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal((tokens, HEADS, DIM)).astype(np.float32).astype(dtype)
             for _ in range(2)] for _ in range(LAYERS)]


def check_landed(node, caches, dtype):
    """Checks that every block at the node is K [t][dim], then V [t][dim], of its head."""
    assert len(node.blocks) == LAYERS * HEADS * -(-TOKENS // BLOCK)
    for (layer, head, first), data in node.blocks.items():
        expected = b"".join(a[first:first + BLOCK, head].astype(dtype).tobytes() for a in caches[layer])
        assert data == expected, (layer, head, first)


def push(node, caches, **kwargs):
    with Pusher(node.address, **kwargs) as pusher:
        pusher.reserve(list(range(TOKENS)), max_new_tokens=9)
        for layer, (k, v) in enumerate(caches):
            pusher.write_layer(layer, k, v)
        return pusher.commit([42])


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_blocks_land_in_the_home_layout(node, streams):
    caches = arrays()
    assert push(node, caches, streams=streams) == "ab" * 16
    check_landed(node, caches, ml_dtypes.bfloat16)
    assert node.manifest.model_fingerprint == "f1"
    assert node.manifest.context_length == TOKENS and node.manifest.max_new_tokens == 9
    assert list(node.manifest.cache_kinds) == [node.kind]
    assert [t.id for t in node.committed.first_tokens] == [42]
    assert node.aborted is None


def test_what_the_node_has_is_not_sent(node):
    node.cached_tokens = BLOCK
    caches = arrays()
    push(node, caches)
    assert {first for _, _, first in node.blocks} == set(range(BLOCK, TOKENS, BLOCK))
    for (layer, head, first), data in node.blocks.items():
        assert data == b"".join(a[first:first + BLOCK, head].astype(ml_dtypes.bfloat16).tobytes()
                                for a in caches[layer])


def test_elements_become_the_nodes_type():
    for element, dtype, source in [(common_pb2.ELEMENT_TYPE_FLOAT32, np.float32, ml_dtypes.bfloat16),
                                   (common_pb2.ELEMENT_TYPE_BFLOAT16, ml_dtypes.bfloat16, np.float32)]:
        node = FakeNode(element)
        try:
            caches = arrays(dtype=source)
            push(node, caches)
            check_landed(node, caches, dtype)
        finally:
            node.server.stop(None)


def test_damaged_chunks_are_sent_again(node):
    node.damage = 3
    caches = arrays()
    push(node, caches)
    check_landed(node, caches, ml_dtypes.bfloat16)
    assert node.write_calls > 3


@pytest.mark.parametrize("streams", [1, 3])
def test_a_broken_stream_resumes(node, streams):
    node.breaks = 2
    caches = arrays()
    push(node, caches, streams=streams)
    check_landed(node, caches, ml_dtypes.bfloat16)


def test_callables_make_lost_chunks_again(node):
    node.damage = 1
    caches, calls = arrays(), []

    def source(layer, part):
        calls.append((layer, part))
        return caches[layer][part]

    with Pusher(node.address) as pusher:
        pusher.reserve(list(range(TOKENS)))
        for layer in range(LAYERS):
            pusher.write_layer(layer, lambda n=layer: source(n, 0), lambda n=layer: source(n, 1))
        pusher.commit()
    check_landed(node, caches, ml_dtypes.bfloat16)
    assert calls


def test_heads_and_token_ranges_may_come_apart(node):
    caches = arrays()
    with Pusher(node.address) as pusher:
        pusher.reserve(list(range(TOKENS)))
        for layer, (k, v) in enumerate(caches):
            for head in (2, 0, 1):
                for begin, end in ((2 * BLOCK, TOKENS), (0, 2 * BLOCK)):
                    pusher.write_layer(layer, k[begin:end, head:head + 1], v[begin:end, head:head + 1],
                                       token_begin=begin, head_begin=head)
        pusher.commit()
    check_landed(node, caches, ml_dtypes.bfloat16)


def test_raw_chunks_are_sent_as_they_are(node):
    caches = arrays()
    with Pusher(node.address) as pusher:
        pusher.reserve(list(range(TOKENS)))
        for layer, parts in enumerate(caches):
            for begin in range(0, TOKENS, BLOCK):
                end = min(begin + BLOCK, TOKENS)
                payload = layout.pack(node.kind, layout.kv_parts(node.kind, *(a[begin:end] for a in parts)))
                pusher.write_chunk(layer, "kv", (0, HEADS), (begin, end), payload)
        pusher.commit()
    check_landed(node, caches, ml_dtypes.bfloat16)


class RankNode(FakeNode):
    """A rank of `node` that takes some heads itself, for the transfers of `node`; it serves Write alone."""

    def __init__(self, node, heads):
        super().__init__(has_admin=False)
        self.blocks, self.heads, self.taken = node.blocks, heads, 0
        node.rank_ports.append(ingest_pb2.RankPort(address=self.address, head_begin=heads[0], head_end=heads[1]))

    def _land(self, message, context):
        if (message.header.head_begin, message.header.head_end) != self.heads:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "heads of another rank")
        super()._land(message, context)
        self.taken += 1

    def Commit(self, request, context):
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "call rank 0")


@pytest.fixture(name="rank")
def _rank(node):
    """The rank of heads 1 and 2 of `node`."""
    fake = RankNode(node, (1, 3))
    yield fake
    fake.server.stop(None)


def test_a_rank_gets_its_heads_at_its_own_port(node, rank):
    caches = arrays()
    push(node, caches)
    check_landed(node, caches, ml_dtypes.bfloat16)
    # A chunk of two heads has three blocks of 8 tokens; of one head, six. 43 tokens are six blocks.
    assert rank.taken == LAYERS * 2 and node.write_calls > 0


def test_a_sender_into_anothers_transfer_goes_to_the_rank_too(node, rank):
    caches = arrays()
    with Pusher(node.address) as reserves, Pusher(node.address) as pusher:
        reserves.reserve(list(range(TOKENS)))
        pusher.attach(reserves.transfer_id, TOKENS, reserves.max_chunk_bytes, 0, reserves.rank_ports)
        for layer, (k, v) in enumerate(caches):
            for heads in pusher.head_parts((0, HEADS)):
                own = slice(*heads)
                payload = layout.pack(node.kind, layout.kv_parts(node.kind, k[:, own], v[:, own]))
                pusher.write_chunk(layer, "kv", heads, (0, TOKENS), payload)
        pusher.settle()
        reserves.commit()
    check_landed(node, caches, ml_dtypes.bfloat16)
    assert rank.taken == LAYERS


@pytest.mark.parametrize("breaks", [0, 1])
def test_what_a_rank_does_not_take_goes_to_the_node(node, rank, breaks, caplog):
    if breaks:
        rank.breaks = 1
    else:
        rank.server.stop(None).wait()
    caches = arrays()
    push(node, caches, streams=1)
    check_landed(node, caches, ml_dtypes.bfloat16)
    assert rank.taken <= 1
    said = [record.getMessage() for record in caplog.records if "the port of a rank" in record.getMessage()]
    assert len(said) == 1 and rank.address in said[0] and node.address in said[0]


def test_heads_are_cut_where_ranks_part(node):
    with Pusher(node.address) as pusher:
        pusher.rank_ports = [ingest_pb2.RankPort(address="a:1", head_begin=2, head_end=4),
                             ingest_pb2.RankPort(address="b:1", head_begin=4, head_end=6)]
        assert pusher.head_parts((0, 8)) == [(0, 2), (2, 4), (4, 6), (6, 8)]
        assert pusher.head_parts((3, 5)) == [(3, 4), (4, 5)]
        assert pusher.head_parts((2, 4)) == [(2, 4)]


def test_an_exception_aborts_the_transfer(node):
    with pytest.raises(ZeroDivisionError):
        with Pusher(node.address) as pusher:
            pusher.reserve([1, 2, 3])
            pusher.write_layer(0, *arrays(tokens=3)[0])
            raise ZeroDivisionError("oops")
    assert node.aborted.transfer_id == "ab" * 16
    assert "oops" in node.aborted.reason
    assert node.committed is None


def test_a_layer_never_written_is_named_and_aborts(node):
    with pytest.raises(PushError, match="missing.*layer 1 kv heads 0-1"):
        with Pusher(node.address) as pusher:
            pusher.reserve(list(range(TOKENS)))
            pusher.write_layer(0, *arrays()[0])
            pusher.commit()
    assert node.aborted is not None


def test_arrays_of_the_wrong_shape_are_refused_here(node):
    with Pusher(node.address) as pusher:
        pusher.reserve(list(range(TOKENS)))
        good = np.zeros((TOKENS, HEADS, DIM), np.float32)
        with pytest.raises(PushError, match="head_dim 5"):
            pusher.write_layer(0, *[np.zeros((TOKENS, HEADS, 5), np.float32)] * 2)
        with pytest.raises(PushError, match="of one shape"):
            pusher.write_layer(0, good, good[1:])
        with pytest.raises(PushError, match="no cache kind 'latent'"):
            pusher.write_layer(0, good, good, kind="latent")


def test_the_servers_refusal_ends_the_push(node):
    with Pusher(node.address) as pusher:
        pusher.reserve(list(range(TOKENS)))
        pusher.write_chunk(0, "kv", (0, 1), (0, BLOCK), b"short")
        with pytest.raises(PushError, match="INVALID_ARGUMENT: payload"):
            pusher.commit()


def test_a_callers_failing_callable_is_raised(node):
    def fail():
        raise RuntimeError("no such page")

    with Pusher(node.address) as pusher:
        pusher.reserve(list(range(TOKENS)))
        pusher.write_chunk(0, "kv", (0, 1), (0, BLOCK), fail)
        with pytest.raises(RuntimeError, match="no such page"):
            pusher.commit()
