"""The sender for SGLang: what it asks for, what it sends, and that no end of a request leaves anything behind."""

import json
import sys
import threading
import time
from types import SimpleNamespace

import grpc
import ml_dtypes
import numpy as np
import pytest
import sglang_stand_in as stand_in
from fake_node import BLOCK, DIM, HEADS, LAYERS, FakeNode
from sluice.v1 import ingest_pb2

stand_in.install()

from sluice_client.sglang_sender import backend, plugin  # noqa: E402
from sluice_client.sglang_sender.ranks import Ranks  # noqa: E402
from sluice_client.sglang_sender.settings import read_settings, read_wish  # noqa: E402

P = stand_in.KVPoll


class Agreed:
    """Ranks of one thread: the first one's answers are kept for the others, which must ask as often."""

    def __init__(self, number, rank, answers):
        self.number, self.rank, self._answers, self._asked = number, rank, answers, 0

    def agree(self, answer):
        if self.rank == 0:
            self._answers.append(answer)
        self._asked += 1
        return self._answers[self._asked - 1]


class Sglang:
    """The schedulers of all ranks, each of which has its heads of every prompt."""

    def __init__(self, page_size=4, ranks=1):
        answers = []
        self.own = max(1, HEADS // ranks)
        self.replicas = ranks * self.own // HEADS
        self.page = page_size
        self.ranks = [stand_in.Scheduler(stand_in.MHATokenToKVPool(LAYERS, self.own, DIM, page_size), LAYERS, HEADS,
                                         Agreed(ranks, rank, answers)) for rank in range(ranks)]
        self.next_page = 1

    def admit(self, rid="r", tokens=37, **fields):
        """Returns the requests of all ranks; each has a sender now."""
        made = [stand_in.request(rid, list(range(tokens)), **fields) for _ in self.ranks]
        for scheduler, req in zip(self.ranks, made):
            scheduler.create(req)
        return made

    def poll(self, reqs):
        """Returns the least state of the ranks, as SGLang reduces it."""
        return min(req.disagg_kv_sender.poll() for req in reqs)

    def slots(self, tokens):
        pages = -(-tokens // self.page)
        first, self.next_page = self.next_page, self.next_page + pages
        order = np.random.default_rng(first).permutation(np.arange(first, first + pages))
        return (order[:, None] * self.page + np.arange(self.page)).reshape(-1)[:tokens]

    def store(self, slots, kv, begin, end):
        """Computes tokens [begin, end): `kv` is K and V [tokens, heads, dim] of each layer."""
        for rank, scheduler in enumerate(self.ranks):
            heads = slice(rank // self.replicas * self.own, (rank // self.replicas + 1) * self.own)
            for layer, (k, v) in enumerate(kv):
                scheduler.pool.k_buffer[layer][slots[begin:end]] = k[begin:end, heads]
                scheduler.pool.v_buffer[layer][slots[begin:end]] = v[begin:end, heads]

    def compute(self, reqs, kv, chunks, cached=0):
        """Computes and sends a prompt in chunks of tokens behind `cached` ones; the last one has the first token."""
        tokens = len(reqs[0].origin_input_ids)
        slots, begin = self.slots(tokens), cached
        self.store(slots, kv, 0, cached)
        for size in chunks:
            end = begin + size
            self.store(slots, kv, begin, end)
            for scheduler, req in zip(self.ranks, reqs):
                if end == tokens:
                    req.output_ids.append(42)
                scheduler.send(req, slots, end, last=end == tokens)
            begin = end


@pytest.fixture(autouse=True)
def loaded(monkeypatch, node):
    """SGLang has loaded the plugin, with the node's address."""
    monkeypatch.setenv("SGLANG_SLUICE", json.dumps({"decode": node.address, "reserve_seconds": 1}))
    monkeypatch.setattr(backend, "Ranks", lambda group: group or Ranks(None))
    plugin.register()
    yield
    stand_in.HookRegistry.reset()


def random_kv(tokens):
    rng = np.random.default_rng(tokens)
    return [[rng.standard_normal((tokens, HEADS, DIM)).astype(np.float32) for _ in range(2)] for _ in range(LAYERS)]


def until(true, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def admitted(sglang, reqs):
    assert sglang.poll(reqs) in (P.Bootstrapping, P.WaitingForInput)
    until(lambda: sglang.poll(reqs) == P.WaitingForInput)


def check_landed(node, kv, tokens):
    """Checks that every block at the node is K, then V, of its head in bfloat16."""
    assert len(node.blocks) == LAYERS * HEADS * -(-tokens // BLOCK)
    for (layer, head, first), data in node.blocks.items():
        end = min(first + BLOCK, tokens)
        assert data == b"".join(a[first:end, head].astype(ml_dtypes.bfloat16).tobytes() for a in kv[layer])


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("tokens, chunks, cached", [(1, [1], 0), (37, [37], 0), (37, [5, 5, 20, 7], 0), (64, [16, 48], 0),
                                                    (100, [20, 48], 32), (33, [1], 32)])
def test_every_token_lands_once_computed(node, page, tokens, chunks, cached):
    sglang, kv = Sglang(page), random_kv(tokens)
    reqs = sglang.admit(tokens=tokens, room=7)
    admitted(sglang, reqs)
    sglang.compute(reqs, kv, chunks, cached)
    until(lambda: sglang.poll(reqs) == P.Success)
    check_landed(node, kv, tokens)
    assert [t.id for t in node.committed.first_tokens] == [42] and node.aborted is None
    assert node.manifest.context_length == tokens and node.manifest.max_new_tokens == 16
    assert reqs[0].customized_info == {"sluice": [{"connector": "SluiceConnector", "transfer_id": "ab" * 16,
                                                   "decode": node.address}]}
    assert reqs[0].disagg_kv_sender.get_transfer_metric().transfer_latency_s > 0
    reqs[0].disagg_kv_sender.abort()  # SGLang may be told too late.
    assert sglang.poll(reqs) == P.Success and node.aborted is None


@pytest.mark.parametrize("ranks", [3, 6])
def test_ranks_send_their_own_heads_and_the_first_commits(node, ranks):
    sglang, kv = Sglang(ranks=ranks), random_kv(37)
    reqs = sglang.admit()
    admitted(sglang, reqs)
    sglang.compute(reqs, kv, [20, 17])
    until(lambda: sglang.poll(reqs) == P.Success)
    check_landed(node, kv, 37)
    assert node.write_calls == HEADS  # of the ranks with the same head only one sends


def test_the_first_rank_waits_for_the_others(node):
    sglang, kv = Sglang(ranks=3), random_kv(16)
    reqs = sglang.admit(tokens=16)
    admitted(sglang, reqs)
    late, sender = reqs[2], reqs[2].disagg_kv_sender
    late.disagg_kv_sender = SimpleNamespace(should_send_kv_chunk=lambda *_: False)
    sglang.compute(reqs, kv, [16])
    until(lambda: sender.poll() == P.WaitingForInput and reqs[1].disagg_kv_sender.poll() == P.Success)
    for _ in range(20):
        assert reqs[0].disagg_kv_sender.poll() == P.Transferring
        time.sleep(0.005)
    assert node.committed is None
    # The last one cannot send: SGLang has each of the ranks name its failure.
    for req in reqs[:2]:
        with pytest.raises(RuntimeError):
            req.disagg_kv_sender.failure_exception()
    until(lambda: node.aborted is not None)
    assert "given up" in node.aborted.reason or "another rank" in node.aborted.reason
    assert node.committed is None


def test_damaged_chunks_and_broken_streams_are_sent_again(node):
    node.damage, node.breaks = 2, 1
    sglang, kv = Sglang(), random_kv(80)
    reqs = sglang.admit(tokens=80)
    admitted(sglang, reqs)
    sglang.compute(reqs, kv, [80])
    until(lambda: sglang.poll(reqs) == P.Success)
    check_landed(node, kv, 80)


@pytest.fixture
def stubborn(monkeypatch):
    """A node whose Reserve the test may replace, and whose leases may be short."""
    class Stubborn(FakeNode):
        renewals, lease_ms = 0, 0

        def Reserve(self, request, context):
            answer = self.reserve(request, context) if hasattr(self, "reserve") else super().Reserve(request, context)
            answer.lease.FromMilliseconds(self.lease_ms)
            self.key = request.rendezvous_key
            return answer

        def Commit(self, request, context):
            self.renewals += not request.first_tokens
            return super().Commit(request, context)
    node = Stubborn()
    monkeypatch.setenv("SGLANG_SLUICE", json.dumps({"decode": node.address, "reserve_seconds": 1}))
    yield node
    node.server.stop(None)


def test_the_room_is_the_key_by_which_the_decode_leg_finds_its_prompt(stubborn):
    sglang = Sglang()
    reqs = sglang.admit(room=1234567)
    admitted(sglang, reqs)
    assert stubborn.key == "1234567"
    admitted(sglang, sglang.admit("q", custom_params={"sluice": {"rendezvous_key": "k", "max_new_tokens": 3}}))
    assert stubborn.key == "k" and stubborn.manifest.max_new_tokens == 3


def test_a_prompt_waits_until_there_is_room(stubborn):
    left = [2]

    def reserve(request, context):
        left[0] -= 1
        if left[0] >= 0:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        return FakeNode.Reserve(stubborn, request, context)
    stubborn.reserve = reserve
    sglang = Sglang()
    reqs = sglang.admit()
    assert sglang.poll(reqs) == P.Bootstrapping
    admitted(sglang, reqs)


def test_a_lease_is_kept_while_the_prompt_waits(stubborn):
    stubborn.lease_ms = 100
    sglang, kv = Sglang(), random_kv(20)
    reqs = sglang.admit(tokens=20)
    admitted(sglang, reqs)
    until(lambda: sglang.poll(reqs) == P.WaitingForInput and stubborn.renewals >= 3)
    sglang.compute(reqs, kv, [20])
    until(lambda: sglang.poll(reqs) == P.Success)
    assert [t.id for t in stubborn.committed.first_tokens] == [42] and stubborn.aborted is None


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT])
def test_without_room_the_request_fails_and_says_why(stubborn, code):
    stubborn.reserve = lambda request, context: context.abort(code, "no room")
    sglang = Sglang(ranks=3)
    reqs = sglang.admit()
    until(lambda: sglang.poll(reqs) == P.Failed)
    for req in reqs:
        with pytest.raises(RuntimeError, match="no room"):
            req.disagg_kv_sender.failure_exception()


def test_a_node_that_is_gone_or_has_another_model_is_named(node, monkeypatch):
    for settings, words in (({"decode": "127.0.0.1:1", "reserve_seconds": 0.2}, "127.0.0.1:1"),
                            ({"decode": node.address, "fingerprint": "another"}, "fingerprint")):
        monkeypatch.setenv("SGLANG_SLUICE", json.dumps(settings))
        sglang = Sglang()
        reqs = sglang.admit()
        until(lambda: sglang.poll(reqs) == P.Failed)
        with pytest.raises(RuntimeError, match=words):
            reqs[0].disagg_kv_sender.failure_exception()


@pytest.mark.parametrize("when", ["reserving", "reserved", "half", "whole", "node dies"])
def test_a_request_that_dies_is_aborted(stubborn, when):
    gate = threading.Event()
    if when == "reserving":
        stubborn.reserve = lambda request, context: gate.wait(5) and FakeNode.Reserve(stubborn, request, context)
    if when == "whole":
        stubborn._missing = lambda: [ingest_pb2.BlockRange(layer=0, kind="kv", head_end=1, token_end=8)]
    sglang, kv = Sglang(), random_kv(40)
    reqs = sglang.admit(tokens=40)
    if when != "reserving":
        admitted(sglang, reqs)
    if when == "node dies":
        stubborn.server.stop(None).wait()
    if when in ("half", "whole", "node dies"):
        sglang.compute(reqs, kv, [20] if when == "half" else [40])
    if when == "node dies":
        until(lambda: sglang.poll(reqs) == P.Failed, 30)
    else:
        reqs[0].disagg_kv_sender.abort()
        gate.set()
        until(lambda: stubborn.aborted is not None)
    assert sglang.poll(reqs) == P.Failed
    sglang.ranks[0].send(reqs[0], sglang.slots(40), 40, last=True)  # nothing is sent any more
    assert sglang.poll(reqs) == P.Failed and stubborn.committed is None
    until(lambda: not [t for t in threading.enumerate() if t.name == "sluice-sender"])


@pytest.mark.parametrize("fields, words", [
    ({"lora_id": "a"}, "LoRA"), ({"multimodal_inputs": object()}, "images"), ({"input_embeds": [[1.0]]}, "embeddings"),
    ({"positional_embed_overrides": object()}, "embeddings"),
    ({"custom_params": {"sluice": {"decode": "x:1"}}}, "custom_params.sluice.decode"),
    ({"custom_params": {"sluice": {"other": 1}}}, "custom_params.sluice.other"),
    ({"custom_params": {"sluice": 3}}, "custom_params.sluice")])
def test_what_the_node_cannot_go_on_with_is_named(node, fields, words):
    sglang = Sglang()
    reqs = [stand_in.request("r", [1])]
    sampling = reqs[0].sampling_params
    sampling.custom_params = fields.pop("custom_params", None)
    reqs[0].__dict__.update(fields)
    sglang.ranks[0].create(reqs[0])
    assert sglang.poll(reqs) == P.Failed and node.manifest is None
    with pytest.raises(RuntimeError, match=words):
        reqs[0].disagg_kv_sender.failure_exception()


@pytest.mark.parametrize("text, words", [
    ("", "JSON"), ("[]", "JSON"), ("{}", "decode"), ('{"decode": "nohost"}', "host:port"),
    ('{"decode": "a:1", "mode": "hold"}', "mode"), ('{"decode": "a:1", "streams": 0}', "streams")])
def test_wrong_settings_are_named(text, words):
    with pytest.raises(ValueError, match="SGLANG_SLUICE") as error:
        read_settings(text)
    assert words in str(error.value)


def test_without_settings_the_plugin_does_nothing(monkeypatch):
    stand_in.HookRegistry.reset()
    monkeypatch.delenv("SGLANG_SLUICE")
    plugin.register()
    assert not stand_in.HookRegistry.originals


def test_the_plugin_adds_a_backend_and_leaves_the_others(monkeypatch):
    utils = sys.modules["sglang.srt.disaggregation.utils"]
    ours, kinds = utils.TransferBackend("sluice"), stand_in.KVClassType
    assert sys.modules["sglang.srt.arg_groups.choices"].DISAGG_TRANSFER_BACKEND_CHOICES.count("sluice") == 1
    assert ours is utils.TransferBackend("sluice") and ours is not utils.TransferBackend.FAKE
    assert utils.get_kv_class(ours, kinds.SENDER) is backend.SluiceKVSender
    assert utils.get_kv_class(ours, kinds.KVARGS) is SimpleNamespace and utils.get_kv_class(ours, kinds.RECEIVER) is None
    assert utils.get_kv_class(utils.TransferBackend.FAKE, kinds.SENDER) == "fake"
    with pytest.raises(ValueError):
        utils.TransferBackend("other")
    with pytest.raises(ValueError, match="prefill"):
        backend.SluiceKVManager(None, stand_in.DisaggregationMode.DECODE, None)


def test_a_request_without_a_room_has_no_key():
    wish = read_wish(stand_in.request("r", [1], max_new_tokens=None), read_settings('{"decode": "a:1"}'))
    assert (wish.rendezvous_key, wish.max_new_tokens) == ("", 1024)
