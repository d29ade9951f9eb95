"""Ports at which ranks of a node take their own caches (rank_ingest_listen): all ranks run on this machine, and meet by
gRPC.

Each of two ranks of tiny-llama has one of its two KV heads. Ranks of tiny-deepseek-v32 have sequences of their own.
"""

import json
import signal
import threading
import time

import grpc
import pytest
from sluice.v1 import decode_pb2, ingest_pb2, ingest_pb2_grpc, prefill_pb2
from sluice_client import rpc
from sluice_client.pusher import Pusher
from support.metrics_text import Scrape
from support.nodes import BIN, DEVICE, TIMEOUT_S, error_of, greedy, matching_steps, run, tokens_of
from support.pki import Pki, token_entry, write_access
from support.rank_lab import EXACT, FLUSH_S, PRECISION, skip_without_gpus, starting_ranks
from support.transfers import Part, Transfer

Code = grpc.StatusCode
EXPERTS = "tiny-deepseek-v32"
MODELS = ["tiny-llama", EXPERTS]
PORTS = ["--rank-ingest-listen", "127.0.0.1:0", "--prefix-cache=false"]


@pytest.fixture(name="ranks")
def _ranks(tiny_models, tmp_path):
    yield from starting_ranks(tiny_models, tmp_path, "grpc")


class Node:
    """A node of two ranks whose second one takes its own caches, and that port."""

    def __init__(self, ranks, model, *flags, credentials=None, **more):
        self.made = ranks(model, 2, *PORTS, *flags, credentials=credentials, **more)
        self.leader = self.made.leader
        (line,) = [json.loads(line) for line in self.made.logs[0].read_text().splitlines()
                   if '"this rank takes its caches itself"' in line]
        self.address = line["rank_ingest_listen"]
        self.channel = rpc.open_channel(self.address, credentials)
        self.port = ingest_pb2_grpc.KvIngestStub(self.channel)

    def write(self, *messages):
        """Writes to the port of rank 1."""
        return self.port.Write(iter(messages), timeout=TIMEOUT_S)

    def transfer(self, g, case=2):
        """Opens a transfer, of which rank 1 has a part. Returns it, and the chunks that are rank 1's and the others."""
        for _ in range(2):
            made = Transfer(self.leader, g, case, reserve=False)
            answer = made.reserve()
            if answer.rank_ports:
                break
            # The first sequence is rank 0's, and stays until the second has been reserved.
        (port,) = answer.rank_ports
        assert port.address == self.address
        assert (port.head_begin, port.head_end) == ((1, 2) if g.name == "tiny-llama" else (0, 1))
        own = [p for p in made.parts() if port.head_begin <= p.heads[0] < port.head_end]
        return made, own, [p for p in made.parts() if p not in own]


@pytest.fixture(name="model", params=MODELS)
def _model(request):
    return request.param


@pytest.fixture(name="g")
def _g(model, golden):
    return golden(model)


@pytest.fixture(name="node")
def _node(ranks, model):
    return Node(ranks, model)


@pytest.fixture(name="right")
def _right(model, g, start, tiny_models):
    """right(transfer) commits it and checks what it decodes to."""
    def check(transfer):
        transfer.commit()
        ids = decode(transfer.node, transfer_id=transfer.id)
        if model != EXPERTS:
            matching_steps(ids, g.tokens(transfer.case)[:len(ids)], g.margins(transfer.case), 0.1)
            return
        # Selections near the cut flip by rounding, so that these are held to one device.
        one = Transfer(start("sluice-server", tiny_models(EXPERTS), *EXACT, "--prefix-cache=false"), g, transfer.case)
        one.write_all()
        one.commit()
        expected = decode(one.node, transfer_id=one.id)
        count = len(expected) if DEVICE == "cpu" else 1
        assert ids[:count] == expected[:count] and ids

    return check


def decode(node, **request):
    found, _ = tokens_of(node.decode.Generate(decode_pb2.GenerateRequest(
        sampling=greedy(max_tokens=24, ignore_eos=True), **request), timeout=TIMEOUT_S))
    return [token.id for token in found]


def writes(log, count):
    """Returns the payload bytes of every Write that a node's access log has. Waits for `count` of them: ranks write
    their lines a moment after the answers.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        text = log.read_text()
        lines = [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]
        found = [line["bytes"] for line in lines if line["method"] == "/sluice.v1.KvIngest/Write"]
        if len(found) >= count or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def test_both_senders_use_the_ports_and_get_one_nodes_answers(ranks, model, start, tiny_models, tmp_path):
    log = tmp_path / "access.log"
    flags = ["--prefix-cache=false"]
    one = start("sluice-server", tiny_models(model), *EXACT, *flags)
    node = Node(ranks, model, "--access-log", str(log))
    prefill = start("sluice-prefill", tiny_models(model), *PRECISION, "--hbm-bytes", "64MiB")
    prompt = [(i * 37) % 250 + 3 for i in range(200)]
    answers = []
    for each in (one, node.leader, node.leader):  # the second of two open transfers of experts is rank 1's
        pushed = prefill.prefill.Run(prefill_pb2.RunRequest(
            prompt_token_ids=prompt, sampling=greedy(max_tokens=24, ignore_eos=True), decode_address=each.address),
            timeout=TIMEOUT_S)
        answers.append(pushed.transfer_id)
    answers = [decode(each, transfer_id=id) for each, id in zip((one, node.leader, node.leader), answers)]
    assert answers[1] == answers[2] and len(answers[1]) == 24
    if DEVICE == "cpu":
        assert answers[0] == answers[1]
    # A prompt goes in two streams, to a head each; or in one, to the rank of its sequence.
    expected = 4 if model == "tiny-llama" else 2
    found = writes(log, expected)
    assert len(found) == expected and len(set(found)) == 1, found
    assert Scrape(node.leader).get("sluice_ingest_bytes_total") == sum(found)


def test_the_python_pusher_uses_the_ports(node, g, right):
    transfers = []
    for _ in range(2):
        with Pusher(node.leader.address, streams=2) as pusher:
            pusher.reserve(g.prompt(2), max_new_tokens=24)
            transfer = Transfer(node.leader, g, 2, reserve=False)
            transfer.id = pusher.transfer_id
            latents = pusher.model.cache_kinds[0].name == "latent"
            names = ("latent", "rope", "index") if latents else "kv"
            for layer in range(pusher.model.layers):
                (pusher.write_latent_layer if latents else pusher.write_layer)(
                    layer, *(g.file[f"case2.{name}.{layer}"] for name in names))
            addresses = set(pusher._streams)
            pusher.settle()
        transfers.append((transfer, addresses))
    for transfer, _ in transfers:
        right(transfer)
    if g.name == "tiny-llama":
        assert all(addresses == {node.address, node.leader.address} for _, addresses in transfers)
    else:
        assert [addresses for _, addresses in transfers] == [{node.leader.address}, {node.address}]


def test_a_sender_that_ignores_the_ports_is_served_as_ever(node, right, g):
    transfer, _, _ = node.transfer(g)
    transfer.write_all()
    right(transfer)


def test_chunks_may_come_to_both_ports(node, g, right):
    transfer, own, others = node.transfer(g)
    half = len(own) // 2
    answer = node.write(*(transfer.message(part) for part in own[:half]))
    assert answer.blocks_landed == half and answer.blocks_missing == len(transfer.parts()) - half
    transfer.write(*(transfer.message(part) for part in (*own[half:], *others)))
    assert node.write(transfer.message(own[-1])).blocks_landed == 0  # the same bytes are there
    right(transfer)
    assert rpc.reason_of(error_of(lambda: node.write(transfer.message(own[0])))) == "TRANSFER_NOT_FOUND"


def test_a_broken_stream_to_a_rank_is_resumed(node, g, right):
    transfer, own, others = node.transfer(g)
    before = Scrape(node.leader).get("sluice_ingest_resumes_total")
    over = threading.Event()

    def breaks():
        for part in own[:4]:
            yield transfer.message(part)
        over.wait(TIMEOUT_S)

    call = node.port.Write.future(breaks(), timeout=TIMEOUT_S)
    while transfer.status().blocks_landed < 4:
        time.sleep(0.01)
    call.cancel()
    over.set()
    transfer.write(*(transfer.message(part) for part in others))
    assert rpc.reason_of(error_of(transfer.commit)) == "MISSING_BLOCKS"
    assert transfer.status().missing.count == len(own) - 4
    deadline = time.monotonic() + TIMEOUT_S
    while "transfer stream broke" not in node.leader.log.read_text():  # rank 0 hears of it a moment later
        assert time.monotonic() < deadline
        time.sleep(0.01)
    node.write(*(transfer.message(part) for part in own[4:]))
    assert Scrape(node.leader).get("sluice_ingest_resumes_total") == before + 1
    right(transfer)


def test_errors_of_a_ranks_port_are_those_of_write(node, g, right):
    transfer, own, others = node.transfer(g)
    message = transfer.message(own[0])
    damaged = transfer.message(own[0], crc32c=message.header.crc32c ^ 1)
    assert rpc.reason_of(error_of(lambda: node.write(damaged))) == "CHECKSUM_MISMATCH"
    assert node.write(message).blocks_landed == 1
    cut = transfer.message(own[1])
    cut.payload = cut.payload[:-1]
    error = error_of(lambda: node.write(cut))
    assert error.code() == Code.INVALID_ARGUMENT and "payload" in error.details()
    error = error_of(lambda: node.write(transfer.message(own[0], transfer_id="0" * 32)))
    assert (error.code(), rpc.reason_of(error)) == (Code.NOT_FOUND, "TRANSFER_NOT_FOUND")
    other = transfer.message(own[0], payload=bytes(len(message.payload)))
    assert rpc.reason_of(error_of(lambda: node.write(other))) == "POISONED"
    assert rpc.reason_of(error_of(lambda: node.write(transfer.message(own[1])))) == "POISONED"
    transfer.abort()
    again, own, others = node.transfer(g)
    node.write(*(again.message(part) for part in own))
    again.write(*(again.message(part) for part in others))
    again.commit()
    assert rpc.reason_of(error_of(lambda: node.write(again.message(own[0])))) == "COMMITTED"
    again.abort()


def test_heads_of_another_rank_are_refused_and_named(node, g, right):
    transfer, own, others = node.transfer(g)
    if g.name == "tiny-llama":
        whole = Part(0, (0, 2), (0, len(transfer.prompt)))
        for part in (others[0], whole):
            error = error_of(lambda p=part: node.write(transfer.message(p)))
            assert error.code() == Code.INVALID_ARGUMENT
            assert "header.head_begin" in error.details() and "rank 1 takes the heads [1, 2)" in error.details()
    else:  # of the sequence that is on rank 0
        first = Transfer(node.leader, g, 2, reserve=False)
        assert not first.reserve().rank_ports
        error = error_of(lambda: node.write(first.message(first.parts()[0])))
        assert error.code() == Code.INVALID_ARGUMENT and "rank 1 takes no heads" in error.details()
    node.write(*(transfer.message(part) for part in own))  # nothing was claimed for good
    transfer.write(*(transfer.message(part) for part in others))
    right(transfer)


def test_a_ranks_port_names_rank_0_for_every_other_call(ranks):
    node = Node(ranks, "tiny-llama")
    calls = [(node.port.Reserve, ingest_pb2.ReserveRequest()), (node.port.Commit, ingest_pb2.CommitRequest()),
             (node.port.Abort, ingest_pb2.AbortRequest()), (node.port.GetTransfer, ingest_pb2.GetTransferRequest())]
    for call, request in calls:
        error = error_of(lambda c=call, r=request: c(r, timeout=TIMEOUT_S))
        assert error.code() == Code.UNIMPLEMENTED and "rank 0 at 127.0.0.1" in error.details(), error


def test_heads_that_several_ranks_have_go_to_rank_0(ranks, golden):
    g = golden("tiny-llama")
    skip_without_gpus(4)
    made = ranks("tiny-llama", 4, *PORTS)
    transfer = Transfer(made.leader, g, 2, reserve=False)
    assert not transfer.reserve().rank_ports
    addresses = [json.loads(line)["rank_ingest_listen"] for log in made.logs for line in log.read_text().splitlines()
                 if '"this rank takes its caches itself"' in line]
    assert len(set(addresses)) == 3
    with rpc.open_channel(addresses[1]) as channel:
        error = error_of(lambda: ingest_pb2_grpc.KvIngestStub(channel).Write(
            iter([transfer.message(transfer.parts()[0])]), timeout=TIMEOUT_S))
    assert error.code() == Code.INVALID_ARGUMENT and "rank 2 takes no heads" in error.details()
    transfer.write_all()
    transfer.commit()
    ids = decode(made.leader, transfer_id=transfer.id)
    matching_steps(ids, g.tokens(2)[:len(ids)], g.margins(2), 0.1)


def test_senders_go_to_rank_0_where_the_port_cannot_be_reached(ranks, start, tiny_models, golden):
    made = ranks("tiny-llama", 2, *PORTS, "--rank-ingest-advertise", "127.0.0.1:1")
    prefill = start("sluice-prefill", tiny_models("tiny-llama"), *PRECISION, "--hbm-bytes", "64MiB")
    pushed = prefill.prefill.Run(prefill_pb2.RunRequest(
        prompt_token_ids=[(i * 37) % 250 + 3 for i in range(200)], sampling=greedy(max_tokens=24, ignore_eos=True),
        decode_address=made.leader.address), timeout=TIMEOUT_S)
    assert len(decode(made.leader, transfer_id=pushed.transfer_id)) == 24
    assert prefill.log.read_text().count("a rank's port takes no caches") == 1
    g = golden("tiny-llama")
    with Pusher(made.leader.address) as pusher:
        pusher.reserve(g.prompt(2), max_new_tokens=24)
        assert [port.address for port in pusher.rank_ports] == ["127.0.0.1:1"]
        for layer in range(pusher.model.layers):
            pusher.write_layer(layer, *(g.file[f"case2.{name}.{layer}"] for name in "kv"))
        transfer_id = pusher.commit()
    ids = decode(made.leader, transfer_id=transfer_id)
    matching_steps(ids, g.tokens(2)[:len(ids)], g.margins(2), 0.1)


def test_a_push_that_breaks_at_a_rank_goes_on_to_rank_0(ranks, start, tiny_models, golden):
    one = start("sluice-server", tiny_models("tiny-llama"), *EXACT, "--prefix-cache=false")
    made = ranks("tiny-llama", 2, *PORTS, failpoints={1: "ingest.reset=error*1"})
    prefill = start("sluice-prefill", tiny_models("tiny-llama"), *PRECISION, "--hbm-bytes", "64MiB")
    answers = []
    for node in (one, made.leader):
        pushed = prefill.prefill.Run(prefill_pb2.RunRequest(
            prompt_token_ids=[(i * 37) % 250 + 3 for i in range(200)], sampling=greedy(max_tokens=24, ignore_eos=True),
            decode_address=node.address), timeout=TIMEOUT_S)
        answers.append(decode(node, transfer_id=pushed.transfer_id))
    assert len(answers[1]) == 24
    if DEVICE == "cpu":
        assert answers[0] == answers[1]
    assert prefill.log.read_text().count("a rank's port takes no caches") == 1
    assert Scrape(made.leader).get("sluice_ingest_resumes_total") >= 1


def test_the_plan_says_where_each_rank_takes_caches(tiny_models):
    flags = [BIN / "sluice-server", "--model", tiny_models("tiny-llama"), "--device", "cpu", "--print-plan",
             "--tensor-parallel", "2", "--leader", "decode-0:7900", "--listen", "0.0.0.0:7000"]
    plan = run(*flags, "--rank-ingest-listen", "0.0.0.0:7002").stdout
    assert "rank 0 takes KV caches at 0.0.0.0:7000\n" in plan and "rank 1 takes its own at 0.0.0.0:7002\n" in plan
    assert "sends on what is for other ranks" in run(*flags).stdout


def test_a_ranks_port_asks_who_calls(ranks, golden, tmp_path):
    pki = Pki(tmp_path / "pki")
    cert, key = pki.issue("decode-0")
    access = write_access(tmp_path / "access.json", certificates=[
        {"identity": "cn:decode-0", "roles": ["decode"]}, {"identity": "cn:router", "roles": ["router", "operator"]},
        {"identity": "cn:prefill", "roles": ["prefill", "router"]}],
        tokens=[token_entry("alice", "a" * 32, "prefill", tenant="alice")])
    flags = ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(pki.ca), "--access-file", str(access),
             "--tls-client-certificate", "optional"]
    node = Node(ranks, "tiny-llama", *flags, credentials=pki.credentials("prefill"))
    transfer, own, others = node.transfer(golden("tiny-llama"))
    message = transfer.message(own[0])

    def refused(credentials):
        with rpc.open_channel(node.address, credentials) as channel:
            return error_of(lambda: ingest_pb2_grpc.KvIngestStub(channel).Write(iter([message]), timeout=TIMEOUT_S))

    assert refused(None).code() == Code.UNAVAILABLE  # without TLS
    assert refused(pki.credentials("router")).code() == Code.PERMISSION_DENIED
    assert refused(pki.bearer("b" * 32)).code() == Code.UNAUTHENTICATED
    assert rpc.reason_of(refused(pki.bearer("a" * 32))) == "TRANSFER_NOT_FOUND"  # another tenant's
    node.write(*(transfer.message(part) for part in own))
    transfer.write(*(transfer.message(part) for part in others))
    transfer.commit()
    assert len(decode(node.leader, transfer_id=transfer.id)) == 24


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_while_a_chunk_comes_ends_the_node(rank, model, ranks, g):
    node = Node(ranks, model, failpoints={rank: "ingest.landing=kill@3"})
    transfer, own, _ = node.transfer(g)
    error = error_of(lambda: node.write(*(transfer.message(part) for part in own)))
    assert error.code() == Code.UNAVAILABLE, error
    expected = [1, 1]
    expected[rank] = -signal.SIGKILL
    assert node.made.statuses(FLUSH_S) == expected
    survivor = node.made.logs[0].read_text() if rank == 0 else node.leader.tail()
    assert f"rank {rank} " in survivor


def test_a_write_ends_when_rank_0_stands_still(ranks, golden):
    node = Node(ranks, "tiny-llama")
    transfer, own, _ = node.transfer(golden("tiny-llama"))
    node.write(transfer.message(own[0]))
    node.leader.process.send_signal(signal.SIGSTOP)
    error = error_of(lambda: node.write(*(transfer.message(part) for part in own[1:])))
    assert error.code() == Code.UNAVAILABLE, error
    assert node.made.followers[0].wait(FLUSH_S) == 1
    node.leader.process.send_signal(signal.SIGCONT)
    assert node.made.statuses(FLUSH_S) == [1, 1]


def test_a_node_stops_while_a_stream_to_a_rank_is_open(ranks, golden):
    node = Node(ranks, "tiny-llama")
    transfer, own, _ = node.transfer(golden("tiny-llama"))
    over = threading.Event()

    def waits():
        yield transfer.message(own[0])
        over.wait(TIMEOUT_S)

    call = node.port.Write.future(waits(), timeout=TIMEOUT_S)
    while transfer.status().blocks_landed < 1:
        time.sleep(0.01)
    node.leader.process.terminate()
    assert node.made.statuses(FLUSH_S) == [0, 0]
    over.set()
    assert call.exception().code() in (Code.UNAVAILABLE, Code.CANCELLED)
