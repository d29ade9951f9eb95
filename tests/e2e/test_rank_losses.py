"""What a rank leaves that is lost, stands still or is slow: streams, transfers and pages of a node of two ranks.

Ranks of tiny-llama have each a part of every sequence; ranks of tiny-deepseek-v32, which divide its experts, have
sequences of their own.
"""

import contextlib
import signal
import threading
import time

import google_crc32c
import grpc
import pytest
from sluice.v1 import decode_pb2
from sluice_client import rpc
from support.failpoint_lab import Stream
from support.nodes import DEVICE, TIMEOUT_S, Golden, error_of, greedy, matching_steps, refused_as_ending, tokens_of
from support.rank_lab import END_S, EXPERTS, FLUSH_S, LONG, MODELS, TRANSPORTS, Ranks, checking, starting_ranks
from support.transfers import Transfer, committed

Code = grpc.StatusCode


@pytest.fixture(name="ranks", params=TRANSPORTS)
def _ranks(request, tiny_models, tmp_path):
    yield from starting_ranks(tiny_models, tmp_path, request.param)


@pytest.fixture(scope="module", name="check")
def _check(start, tiny_models):
    return checking(start, tiny_models)


class Scene:
    """A node whose streams run while a transfer comes in, until a rank is lost."""

    def __init__(self, made: Ranks, g: Golden, check):
        self.made, self.node, self.g, self.check = made, made.leader, g, check
        self.streams = []
        self.writes: list[grpc.RpcError | None] = []
        self.threads = []

    def begin(self, streams=2):
        for _ in range(streams):
            transfer = Transfer(self.node, self.g, 1, LONG)
            transfer.write_all()
            transfer.commit()
            self.streams.append(Stream(self.node, transfer_id=transfer.id,
                                       sampling=greedy(max_tokens=LONG, ignore_eos=True)))
        thread = threading.Thread(target=self._hand_over)
        thread.start()
        self.threads.append(thread)

    def wait_for_tokens(self):
        for stream in self.streams:
            stream.wait_for_tokens(3)

    def _hand_over(self):
        """Hands prompts over, and decodes them, until the node no longer takes any."""
        try:
            while True:
                transfer = Transfer(self.node, self.g, case=2)
                transfer.write_all()
                transfer.commit()
                found, _ = tokens_of(self.node.decode.Generate(decode_pb2.GenerateRequest(
                    transfer_id=transfer.id, sampling=greedy(max_tokens=24)), timeout=TIMEOUT_S))
                self.check(self.g, 2, [token.id for token in found])
        except grpc.RpcError as error:
            self.writes.append(error)

    def check_lost(self, rank, since):
        """Checks that every stream has ended by the loss of `rank`, in time, and with no bad token."""
        for stream in self.streams:
            stream.thread.join(max(0.1, since + END_S - time.monotonic()))
            assert not stream.thread.is_alive(), f"a stream hangs {time.monotonic() - since:.1f} s after the loss"
        for thread in self.threads:
            thread.join(FLUSH_S)
            assert not thread.is_alive(), "a hand-over hangs"
        expected = self.g.tokens(1)
        for stream in self.streams:
            found = stream.ids[:len(expected)]
            matching_steps(found, expected[:len(found)], self.g.margins(1), 0.1)
            if rank == 0:
                assert stream.error.code() == Code.UNAVAILABLE
                continue
            assert (stream.error.code(), rpc.reason_of(stream.error)) == (Code.UNAVAILABLE, "RANK_LOST"), stream.error
            assert f"rank {rank} " in stream.error.details()
        # All streams are greedy and of one prompt: where one has a token, the others have the same one.
        longest = max((stream.ids for stream in self.streams), key=len, default=[])
        assert all(stream.ids == longest[:len(stream.ids)] for stream in self.streams)
        assert len(self.writes) == len(self.threads)
        for error in self.writes:
            assert refused_as_ending(error), error

    def check_ended(self, rank, status):
        expected = [1, 1]
        expected[rank] = status
        assert self.made.statuses(FLUSH_S) == expected


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_streams_and_transfers(rank, name, ranks, golden, check):
    scene = Scene(ranks(name, 2, "--prefix-cache=false"), golden(name), check)
    scene.begin()
    scene.wait_for_tokens()
    since = time.monotonic()
    scene.made.processes()[rank].kill()
    scene.check_lost(rank, since)
    scene.check_ended(rank, -signal.SIGKILL)


# Each kills its process where it stands. The first hits are those of the start: a canary of two tokens.
FAILPOINTS = [
    (0, "ingest.landing=kill@30"), (0, "ingest.write_answer=kill@1"), (0, "ingest.commit_answer=kill@2"),
    (0, "kv.reserve=kill@3"), (0, "kv.wake=kill@5"), (0, "kv.reap=kill@20"), (0, "kv.admit=kill@4"),
    (0, "kv.copy=kill@3"), (0, "engine.step=kill@30"), (0, "engine.wake=kill@8"), (0, "engine.queue=kill@3"),
    (0, "engine.logits=kill@30"), (0, "decode.sink=kill@30"), (0, "service.handler=kill@10"),
    (0, "rank.collective=kill@301"), (0, "rank.collective=kill@308"),
    (1, "kv.admit=kill@4"), (1, "kv.copy=kill@3"), (1, "rank.order=kill@12"), (1, "rank.order=kill@40"),
    (1, "rank.collective=kill@301"), (1, "rank.collective=kill@304"), (1, "rank.collective=kill@308"),
]
# Rank 1 has one of the two streams. On rank 0 what stands for rank 1 is admitted too.
EXPERT_FAILPOINTS = [
    (0, "ingest.landing=kill@30"), (0, "kv.reserve=kill@3"), (0, "kv.admit=kill@3"), (0, "engine.step=kill@30"),
    (1, "kv.admit=kill"), (1, "kv.copy=kill"), (1, "rank.order=kill@12"), (1, "rank.order=kill@40"),
]
FAILURES = [("tiny-llama", *each) for each in FAILPOINTS] + [(EXPERTS, *each) for each in EXPERT_FAILPOINTS]


@pytest.mark.skipif(DEVICE == "cuda", reason="collectives of a GPU have no failpoint")
@pytest.mark.parametrize("name,rank,terms", FAILURES,
                         ids=[f"{terms} on rank {rank} of {name}" for name, rank, terms in FAILURES])
def test_a_rank_that_is_killed_at_a_failpoint_ends_the_node(name, rank, terms, ranks, golden, check):
    scene = Scene(ranks(name, 2, "--prefix-cache=false", failpoints={rank: terms}), golden(name), check)
    try:
        scene.begin()
    except grpc.RpcError as error:  # rank 0 is gone before the streams have begun
        assert error.code() == Code.UNAVAILABLE
    scene.made.processes()[rank].wait(TIMEOUT_S)
    scene.check_lost(rank, time.monotonic())
    scene.check_ended(rank, -signal.SIGKILL)


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_that_is_slow_is_waited_for(name, ranks, golden, check):
    g = golden(name)
    node = ranks(name, 2, "--prefix-cache=false", failpoints={
        1: "rank.order=delay(20ms);kv.copy=delay(100ms);rank.collective=delay(2ms)%0.2"}).leader
    for case in (0, 1, 2, 2, 2):
        # Two at once, of which each rank of experts has one.
        pair = [Stream(node, transfer_id=committed(node, g, case), sampling=greedy(max_tokens=24)) for _ in range(2)]
        for stream in pair:
            assert stream.end().error is None
            check(g, case, stream.ids)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's copies have no failpoint")
@pytest.mark.parametrize("name,dram", [("tiny-llama", "640KiB"), (EXPERTS, "3MiB")])
def test_pages_are_free_when_every_rank_has_let_go_of_them(name, dram, ranks, golden, check):
    g = golden(name)
    # DRAM has room for one prompt, and rank 1 still copies it when rank 0 is done with it.
    node = ranks(name, 2, "--prefix-cache=false", dram=dram, failpoints={1: "kv.copy=delay(400ms)"}).leader
    if name == EXPERTS:
        Transfer(node, g, case=2)  # fills rank 0's DRAM
    first = Transfer(node, g, case=2)
    first.write_all()
    first.commit()
    stream = Stream(node, transfer_id=first.id, sampling=greedy(max_tokens=24))
    second = Transfer(node, g, case=2, reserve=False)
    deadline = time.monotonic() + TIMEOUT_S
    while not second.id:
        try:
            second.reserve()
        except grpc.RpcError as error:
            assert rpc.reason_of(error) == "DRAM_FULL" and time.monotonic() < deadline, error
    for part in second.parts():
        size = len(second.message(part).payload)
        second.write(second.message(part, payload=b"\x3f" * size, crc32c=google_crc32c.value(b"\x3f" * size)))
    assert stream.end().error is None
    check(g, 2, stream.ids)
    second.abort()


@pytest.mark.parametrize("name", MODELS)
def test_a_stopped_rank_ends_streams_and_transfers(name, ranks, golden, check):
    scene = Scene(ranks(name, 2, "--prefix-cache=false"), golden(name), check)
    scene.begin()
    scene.wait_for_tokens()
    since = time.monotonic()
    follower = scene.made.followers[0]
    follower.send_signal(signal.SIGSTOP)
    scene.check_lost(1, since)
    assert scene.made.leader.process.wait(FLUSH_S) == 1
    follower.send_signal(signal.SIGCONT)
    scene.check_ended(1, 1)


def test_a_rank_that_is_stopped_while_nothing_runs_ends_the_node(ranks):
    made = ranks("tiny-llama", 2)
    since = time.monotonic()
    made.followers[0].send_signal(signal.SIGSTOP)
    with contextlib.suppress(OSError):  # nobody waits for an answer, so it ends at once
        while made.leader.http("/readyz")[0] == 200:
            assert time.monotonic() - since < END_S, "the node stays ready"
            time.sleep(0.02)
    assert made.leader.process.wait(FLUSH_S) == 1
    assert "rank 1 " in made.leader.tail() and "stood still" in made.leader.tail()


def test_the_others_end_when_rank_0_is_stopped(ranks, golden):
    made = ranks("tiny-llama", 2, "--prefix-cache=false")
    stream = Stream(made.leader, transfer_id=committed(made.leader, golden("tiny-llama"), 1, LONG),
                    sampling=greedy(max_tokens=LONG, ignore_eos=True))
    stream.wait_for_tokens(3)
    made.leader.process.send_signal(signal.SIGSTOP)
    assert made.followers[0].wait(END_S) == 1
    assert "rank 0 " in made.logs[0].read_text()
    made.leader.process.send_signal(signal.SIGCONT)
    assert stream.end().error.code() == Code.UNAVAILABLE
    assert made.statuses(FLUSH_S) == [1, 1]


def test_a_lost_rank_refuses_what_comes_after(ranks, golden):
    """Between the loss and the end of the process nothing is taken that could not be answered."""
    made = ranks("tiny-llama", 2, "--prefix-cache=false")
    transfer = Transfer(made.leader, golden("tiny-llama"), case=2)
    waiting = Stream(made.leader, transfer_id=transfer.id, sampling=greedy(max_tokens=4))
    made.followers[0].kill()
    waiting.end()
    assert (waiting.error.code(), rpc.reason_of(waiting.error)) == (Code.UNAVAILABLE, "RANK_LOST")
    error = error_of(lambda: made.leader.ingest.Reserve(transfer.request, timeout=TIMEOUT_S))
    assert refused_as_ending(error), error
    assert made.statuses(FLUSH_S) == [1, -signal.SIGKILL]
