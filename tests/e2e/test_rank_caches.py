"""Caches of a node of two ranks: what is handed over, kept and shared.

Ranks of tiny-llama have each a part of every sequence; ranks of tiny-deepseek-v32, which divide its experts, have
sequences of their own.
"""

import json
import threading
import time

import grpc
import pytest
from google.protobuf import duration_pb2
from sluice.v1 import admin_pb2, common_pb2, decode_pb2, ingest_pb2, prefill_pb2
from sluice_client import rpc
from support.failpoint_lab import Stream
from support.metrics_text import Scrape
from support.nodes import DEVICE, SCALE, TIMEOUT_S, error_of, greedy, tokens_of
from support.rank_lab import (CASES, EXACT, EXPERTS, FLUSH_S, LONG, MODELS, PRECISION, TRANSPORTS, AdminPort, Ranks, checking,
                              generate, skip_without_gpus, starting_ranks)
from support.transfers import Part, Transfer, committed

Code = grpc.StatusCode
# A prefill node has other bits where its kernels sum otherwise; what is compared is of one precision.
PREFILL = [*PRECISION, "--hbm-bytes", "64MiB"]


@pytest.fixture(name="ranks", params=TRANSPORTS)
def _ranks(request, tiny_models, tmp_path):
    yield from starting_ranks(tiny_models, tmp_path, request.param)


@pytest.fixture(scope="module", name="shared", params=MODELS)
def _shared(request):
    """The name of the model of `node`."""
    return request.param


@pytest.fixture(name="g")
def _g(shared, golden):
    return golden(shared)


@pytest.fixture(scope="module", name="node", params=TRANSPORTS)
def _node(request, shared, tiny_models, tmp_path_factory):
    """A node of two ranks that the tests share."""
    made = Ranks(tiny_models(shared), tmp_path_factory.mktemp("ranks"), 2, "--prefix-cache=false",
                 transport=request.param)
    yield made.leader
    made.leader.settled()
    made.leader.process.terminate()
    statuses = made.statuses(FLUSH_S)
    made.end()
    assert statuses == [0, 0], made.leader.tail()


@pytest.fixture(scope="module", name="prefill")
def _prefill(start, tiny_models):
    """prefill(name) -> a prefill node of the model."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = start("sluice-prefill", tiny_models(name), *PREFILL, "--hold-seconds", "30s")
        return made[name]

    return get


@pytest.fixture(scope="module", name="check")
def _check(start, tiny_models):
    return checking(start, tiny_models)


@pytest.fixture(autouse=True)
def unharmed(request):
    """Checks that a test on the shared node leaves nothing there."""
    if "node" not in request.fixturenames:
        yield
        return
    node = request.getfixturevalue("node")
    before = node.settled()
    yield
    node.wait_until_held(before)


# ---- What comes in ----

@pytest.mark.parametrize("name,size", [("tiny-llama", 2), ("tiny-qwen2", 2), ("tiny-qwen3", 2), ("tiny-llama", 4),
                                       (EXPERTS, 2), (EXPERTS, 4)])
def test_golden_caches_decode_to_golden_tokens(name, size, ranks, golden, check):
    skip_without_gpus(size)
    leader, g = ranks(name, size).leader, golden(name)
    for case in CASES:
        ids, finish = generate(leader, transfer_id=committed(leader, g, case))
        check(g, case, ids)
        assert finish.usage.cached_tokens == len(g.prompt(case))


@pytest.mark.parametrize("name,policy,size", [
    ("tiny-llama", "full", 2), ("tiny-llama", "scout", 2), ("tiny-llama", "recall", 2), ("tiny-llama", "hgca", 2),
    (EXPERTS, "full", 2), ("tiny-deepseek-v32-fp8", "full", 4), (EXPERTS, "ess", 2), ("tiny-deepseek-v32-fp8", "ess", 4)])
def test_push_and_pull_decode_as_on_one_device(name, policy, size, ranks, start, tiny_models, prefill):
    skip_without_gpus(size)
    flags = ["--policy", policy, "--prefix-cache=false"]
    if policy == "ess":  # fewer places than the prompt has tokens: hints and misses matter
        flags += ["--ess-sparse-memory-ratio", "0.01", "--ess-least-places", "96"]
    one = start("sluice-server", tiny_models(name), *EXACT, *flags)
    several = ranks(name, size, *flags).leader
    prompt = [(i * 37) % 250 + 3 for i in range(200)]
    answers = []
    for node in (one, several):
        pushed = prefill(name).prefill.Run(prefill_pb2.RunRequest(
            prompt_token_ids=prompt, sampling=greedy(max_tokens=24, ignore_eos=True), decode_address=node.address),
            timeout=TIMEOUT_S)
        answers.append(generate(node, transfer_id=pushed.transfer_id)[0])
        held = prefill(name).prefill.Run(prefill_pb2.RunRequest(prompt_token_ids=prompt, sampling=greedy(max_tokens=1)),
                                   timeout=TIMEOUT_S)
        answers.append(generate(node, source=held.source, prompt_token_ids=prompt)[0])
    assert answers[0] == answers[1] and len(answers[0]) == 24
    if DEVICE == "cpu":
        assert answers[2:] == answers[:2]


def test_a_broken_stream_is_resumed(node, g, check):
    transfer = Transfer(node, g, case=2)
    parts = transfer.parts()
    assert len({(p.kind, p.heads) for p in parts}) == 2  # a head of each rank, or two kinds
    over = threading.Event()

    def breaks():
        for part in parts[:20]:
            yield transfer.message(part)
        over.wait(TIMEOUT_S)

    call = node.ingest.Write.future(breaks(), timeout=TIMEOUT_S)
    while transfer.status().blocks_landed < 20:
        time.sleep(0.01)
    call.cancel()
    over.set()
    error = error_of(transfer.commit)
    assert rpc.reason_of(error) == "MISSING_BLOCKS"
    missing = transfer.status().missing
    assert missing.count == len(parts) - 20
    transfer.write(*(transfer.message(part) for part in parts[20:]))
    transfer.commit()
    check(g, 2, generate(node, transfer_id=transfer.id)[0])


def test_chunks_of_all_heads_and_kinds_in_any_order(node, g, check):
    transfer = Transfer(node, g, case=2)
    transfer.write(*(transfer.message(Part(layer, (0, kind.heads), tokens, kind.name))
                     for layer in reversed(range(transfer.model.layers)) for kind in transfer.model.cache_kinds
                     for tokens in ((128, len(transfer.prompt)), (0, 64), (64, 128))))
    transfer.commit()
    check(g, 2, generate(node, transfer_id=transfer.id)[0])


@pytest.mark.parametrize("which", [0, 1])
def test_other_bytes_for_a_landed_block_poison_the_transfer(which, node, g):
    transfer = Transfer(node, g)
    part = [p for p in transfer.parts() if p.layer == 1 and p.tokens[0] == 0][which]  # of two heads, or kinds
    message = transfer.message(part)
    assert transfer.write(message).blocks_landed == 1
    assert transfer.write(message).blocks_landed == 0
    other = transfer.message(part, payload=bytes(len(message.payload)))
    assert rpc.reason_of(error_of(lambda: transfer.write(other))) == "POISONED"
    transfer.abort()


def test_the_node_describes_the_caches_of_all_ranks(node, shared, start, tiny_models):
    one = start("sluice-server", tiny_models(shared), *EXACT)
    kinds = [n.admin.GetModel(admin_pb2.GetModelRequest(), timeout=TIMEOUT_S).model.cache_kinds for n in (one, node)]
    assert kinds[0] == kinds[1] and kinds[0][0].heads == (2 if shared == "tiny-llama" else 1)


@pytest.mark.parametrize("name,dram", [("tiny-llama", "4MiB"), (EXPERTS, "16MiB")])
def test_a_full_node_refuses_and_takes_again(name, dram, ranks, golden, check):
    g = golden(name)
    node = ranks(name, 2, "--prefix-cache=false", dram=dram).leader
    rest = node.settled()
    open_transfers = []
    while True:
        try:
            open_transfers.append(Transfer(node, g, case=2))
        except grpc.RpcError as error:
            assert error.code() == Code.RESOURCE_EXHAUSTED and rpc.reason_of(error) == "DRAM_FULL"
            assert "RetryInfo" in rpc.details_of(error)
            break
    # A rank has one of two heads, in float32: half as much as one device for each token. Or it has half of the
    # sequences.
    assert len(open_transfers) >= 8
    for transfer in open_transfers[1:]:
        transfer.abort()
    for _ in range(2 * len(open_transfers)):  # over all pages, and some again
        check(g, 2, generate(node, transfer_id=committed(node, g, 2))[0])
    open_transfers[0].write_all()
    open_transfers[0].commit()
    check(g, 2, generate(node, transfer_id=open_transfers[0].id)[0])
    node.wait_until_held(rest)


def test_streams_of_handed_over_prompts_run_together(node, g, check):
    streams = [Stream(node, transfer_id=committed(node, g, i % 3), sampling=greedy(max_tokens=24)) for i in range(12)]
    for i, stream in enumerate(streams):
        assert stream.end().error is None
        check(g, i % 3, stream.ids)


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_is_kept_and_goes_on(name, ranks, start, tiny_models):
    computes = ("--local-prefill", "always")
    answers = []
    for node in (start("sluice-server", tiny_models(name), *EXACT, *computes), ranks(name, 2, *computes).leader):
        prompt = [(i * 11) % 300 + 3 for i in range(90)]
        first, finish = generate(node, prompt_token_ids=prompt, keep=duration_pb2.Duration(seconds=30))
        assert finish.sequence_id
        second, more = generate(node, sequence_id=finish.sequence_id, prompt_token_ids=[5, 6, 7])
        assert more.usage.cached_tokens == 90 + 24 - 1
        again, reused = generate(node, prompt_token_ids=prompt)
        assert again == first and reused.usage.reused_tokens >= 64
        answers.append((first, second))
    if DEVICE == "cpu":
        assert answers[0] == answers[1]


@pytest.mark.parametrize("name", MODELS)
def test_every_rank_has_metrics_of_its_own(name, ranks):
    made = ranks(name, 2)
    (line,) = [json.loads(line) for line in made.logs[0].read_text().splitlines() if '"following"' in line]
    follower = AdminPort(line["admin_listen"])
    found = [Scrape(made.leader), Scrape(follower)]
    assert [scrape.get("sluice_rank") for scrape in found] == [0, 1]
    assert [scrape.get("sluice_ranks_alive") for scrape in found] == [2, 2]
    kind = "kv" if name == "tiny-llama" else "latent"
    sizes = [scrape.get("sluice_tier_capacity_bytes", tier="dram", kind=kind) for scrape in found]
    # Rank 0 says what all ranks have that have sequences of their own.
    assert sizes[0] == sizes[1] * (1 if name == "tiny-llama" else 2) > 0
    assert all(scrape.get("process_resident_memory_bytes") > 0 for scrape in found)
    assert follower.http("/readyz")[0] == 200


@pytest.mark.parametrize("name", MODELS)
def test_a_drain_lets_streams_finish_on_every_rank(name, ranks, golden):
    g = golden(name)
    made = ranks(name, 2, "--prefix-cache=false")
    streams = [Stream(made.leader, transfer_id=committed(made.leader, g, 1, 200),
                      sampling=greedy(max_tokens=200, ignore_eos=True)) for _ in range(3)]
    for stream in streams:
        stream.wait_for_tokens(1)
    made.leader.process.terminate()
    deadline = time.monotonic() + TIMEOUT_S
    while True:  # the signal comes a moment later
        try:
            made.leader.ingest.Reserve(Transfer(made.leader, g, reserve=False).request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            assert error.code() == Code.UNAVAILABLE
            break
        assert time.monotonic() < deadline
    for stream in streams:
        assert stream.end().error is None and len(stream.ids) == 200
    assert made.statuses(FLUSH_S) == [0, 0]


def test_samples_of_ranks_are_those_of_one_device(node, g, shared, start, tiny_models):
    one = start("sluice-server", tiny_models(shared), *EXACT, "--prefix-cache=false")
    answers = []
    for each in (one, node):
        found, _ = tokens_of(each.decode.Generate(decode_pb2.GenerateRequest(
            transfer_id=committed(each, g, 2, 40), sampling=common_pb2.SamplingParams(
                temperature=0.9, top_k=30, seed=11, max_tokens=40, ignore_eos=True)), timeout=TIMEOUT_S))
        answers.append([token.id for token in found])
    if DEVICE == "cpu":
        assert answers[0] == answers[1]


def test_an_expired_lease_gives_pages_of_every_rank_back(node, g, check):
    transfer = Transfer(node, g, case=2, lease=duration_pb2.Duration(nanos=200_000_000))
    transfer.write(*(transfer.message(part) for part in transfer.parts()[:20]))
    time.sleep(0.4 * SCALE)
    assert error_of(transfer.commit).code() == Code.NOT_FOUND
    status = ingest_pb2.GetTransferRequest(transfer_id=transfer.id)
    assert error_of(lambda: node.ingest.GetTransfer(status, timeout=TIMEOUT_S)).code() == Code.NOT_FOUND
    check(g, 2, generate(node, transfer_id=committed(node, g, 2))[0])


# ---- Ranks of experts alone ----

def test_a_kept_sequence_goes_on_where_it_was_when_the_other_rank_is_empty(ranks):
    node = ranks(EXPERTS, 2, "--local-prefill", "always", "--prefix-cache=false").leader
    prompt = [(i * 11) % 300 + 3 for i in range(90)]
    # The second of two that run at once is rank 1's.
    long = Stream(node, prompt_token_ids=prompt, sampling=greedy(max_tokens=300, ignore_eos=True))
    long.wait_for_tokens(1)
    _, finish = generate(node, prompt_token_ids=prompt, keep=duration_pb2.Duration(seconds=30))
    long.leave()
    second, more = generate(node, sequence_id=finish.sequence_id, prompt_token_ids=[5, 6, 7])
    assert more.usage.cached_tokens == 90 + 24 - 1 and len(second) == 24


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's copies have no failpoint")
def test_copies_of_a_rank_hold_up_no_other(ranks, golden, check):
    g = golden(EXPERTS)
    node = ranks(EXPERTS, 2, "--prefix-cache=false", failpoints={1: "kv.copy=delay(4s)*1"}).leader
    # While the first one runs, the second is rank 1's.
    first = Stream(node, transfer_id=committed(node, g, 0, LONG), sampling=greedy(max_tokens=LONG, ignore_eos=True))
    first.wait_for_tokens(2)
    second = Stream(node, transfer_id=committed(node, g, 1), sampling=greedy(max_tokens=24))
    begin = time.monotonic()
    first.wait_for_tokens(len(first.ids) + 20)
    assert time.monotonic() - begin < 2 and not second.ids
    second.wait_for_tokens(1)
    assert time.monotonic() - begin > 3
    assert first.end().error is None and second.end().error is None
    check(g, 0, first.ids[:24])
    check(g, 1, second.ids)
    node.settled()
