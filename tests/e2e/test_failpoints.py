"""Faults on purpose: what the caller sees, and that nothing else is harmed.

Each test arms failpoints of src/base/failpoint.h, does its work, and checks what that header says about what survives.
Around each test, sequences that run beside it give the same tokens as without the fault, the next good request works,
and nothing stays reserved.
"""

import re
import threading
import time
import uuid
from pathlib import Path

import grpc
import pytest
from google.protobuf import duration_pb2
from sluice.v1 import admin_pb2, decode_pb2, prefill_pb2
from sluice_client import rpc
from support.failpoint_lab import LONG, PACE, Lab, Stream
from support.metrics_text import Scrape
from support.nodes import BIN, DEVICE, ENVIRONMENT, SCALE, SLUICE, TIMEOUT_S, Node, error_of, greedy, run
from support.transfers import committed

Code = grpc.StatusCode
AFTER = 50  # tokens that a sequence beside a fault has to give after it
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def the_lab(tiny_models, start, golden):
    node = start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "16MiB", "--dram-bytes", "16MiB",
                 "--allow-failpoints", "--local-prefill", "always")
    return Lab(node, golden("tiny-llama"))


@pytest.fixture
def lab(the_lab):
    """The lab at rest before and after the test, when a good request works."""
    yield the_lab
    the_lab.set(clear=True)
    the_lab.node.wait_until_held(the_lab.at_rest)
    the_lab.check_good_request()
    the_lab.node.wait_until_held(the_lab.at_rest)


@pytest.fixture
def busy(lab):
    """The lab with two sequences that run during the whole test and are not harmed."""
    lab.set(PACE)
    neighbours = [lab.start(LONG) for _ in range(2)]
    for neighbour in neighbours:
        neighbour.wait_for_tokens(1)
    yield lab
    seen = [len(neighbour.ids) for neighbour in neighbours]
    lab.set(clear=True)
    for neighbour, count in zip(neighbours, seen):
        neighbour.wait_for_tokens(min(count + AFTER, LONG))
        neighbour.leave()
        assert neighbour.error is None and neighbour.ids == lab.long[:len(neighbour.ids)]
    assert all(count < LONG for count in seen), "the neighbours were done before the fault was"


def fired(lab, name):
    return lab.state(name).fired


# ---- The way in

def test_no_dram_at_reserve_is_refused_with_when_to_try_again(busy):
    busy.set("kv.reserve=error*1")
    error = error_of(busy.transfer)
    assert error.code() == Code.RESOURCE_EXHAUSTED and rpc.reason_of(error) == "DRAM_FULL"
    assert rpc.retry_seconds(error) > 0
    assert fired(busy, "kv.reserve") == 1
    assert busy.dram_used() == 0


def test_a_damaged_chunk_stays_missing_and_may_be_sent_again(busy):
    transfer = busy.transfer()
    parts = transfer.parts()
    busy.set("ingest.checksum=error*1@1")
    error = error_of(lambda: transfer.write(*(transfer.message(p) for p in parts)))
    assert error.code() == Code.DATA_LOSS and "layer" in error.details()
    assert transfer.status().blocks_landed == 1 and fired(busy, "ingest.checksum") == 1
    transfer.write_all()
    transfer.commit()
    assert busy.start(24, transfer_id=transfer.id).end().ids == busy.long[:24]


def test_a_writer_held_up_beyond_its_lease_keeps_its_pages_till_it_ends(busy):
    transfer = busy.transfer(lease=duration_pb2.Duration(nanos=200_000_000))
    held_up_ms = int(1500 * min(SCALE, 2))  # the sequences beside it run for about 5 s, however slow the machine
    busy.set(f"ingest.landing=delay({held_up_ms}ms)*1")
    errors = []
    writer = threading.Thread(target=lambda: errors.append(error_of(transfer.write_all)))
    writer.start()
    busy.wait_for_transfers(0)
    assert writer.is_alive(), "the lease should end while the writer is held up"
    # The transfer has ended while its pages are not free yet: other transfers get other pages, and their tokens are
    # right.
    assert busy.dram_used() > 0
    busy.check_good_request()
    assert writer.is_alive(), "the writer should still be held up"
    writer.join(TIMEOUT_S)
    assert [e.code() for e in errors] == [Code.NOT_FOUND]
    assert fired(busy, "ingest.landing") == 1 and busy.dram_used() == 0


def test_a_write_stream_that_breaks_resumes_from_what_has_landed(busy):
    transfer = busy.transfer()
    parts = transfer.parts()
    busy.set("ingest.reset=error*1@2")
    assert error_of(transfer.write_all).code() in (Code.CANCELLED, Code.UNAVAILABLE)
    assert fired(busy, "ingest.reset") == 1
    status = transfer.status()
    assert status.blocks_landed == 3 < len(parts)
    missing = {(r.layer, head) for r in status.missing.ranges for head in range(r.head_begin, r.head_end)}
    transfer.write(*(transfer.message(p) for p in parts if (p.layer, p.heads[0]) in missing))
    transfer.commit()
    assert busy.start(24, transfer_id=transfer.id).end().ids == busy.long[:24]


def test_the_answer_to_a_write_may_be_lost(busy):
    transfer = busy.transfer()
    busy.set("ingest.write_answer=error*1")
    assert error_of(transfer.write_all).code() in (Code.CANCELLED, Code.UNAVAILABLE)
    assert fired(busy, "ingest.write_answer") == 1
    assert transfer.status().blocks_landed == transfer.status().blocks_total
    transfer.write_all()  # like a sender that sends again without asking
    transfer.commit()
    assert busy.start(24, transfer_id=transfer.id).end().ids == busy.long[:24]


@pytest.mark.parametrize("decode_before_repeating", [False, True])
def test_the_answer_to_a_commit_may_be_lost(busy, decode_before_repeating):
    transfer = busy.transfer()
    transfer.write_all()
    busy.set("ingest.commit_answer=error*1")
    assert error_of(transfer.commit).code() in (Code.CANCELLED, Code.UNAVAILABLE)
    assert fired(busy, "ingest.commit_answer") == 1
    if not decode_before_repeating:
        assert transfer.commit().context_length == len(transfer.prompt)
    assert busy.start(24, transfer_id=transfer.id).end().ids == busy.long[:24]
    if decode_before_repeating:
        assert transfer.commit().context_length == len(transfer.prompt)


def test_a_lease_ends_though_passes_over_the_leases_are_left_out(lab):
    lab.set("kv.reap=error*3")
    lab.transfer(lease=duration_pb2.Duration(nanos=100_000_000))
    lab.node.wait_until_held(lab.at_rest)
    assert fired(lab, "kv.reap") == 3


@pytest.mark.parametrize("call", ["Reserve", "Write", "Commit", "Generate"])
def test_a_handler_that_throws_ends_its_own_call(busy, call):
    transfer = busy.transfer(reserve=False)
    steps = {"Reserve": transfer.reserve, "Write": transfer.write_all, "Commit": transfer.commit,
             "Generate": lambda: busy.node.decode.Generate(decode_pb2.GenerateRequest(
                 transfer_id=transfer.id, sampling=greedy(max_tokens=1)), timeout=TIMEOUT_S)}
    for name, step in steps.items():
        if name == call:
            busy.set("service.handler=error*1")
            error = error_of(step)
            assert error.code() == Code.INTERNAL and rpc.reason_of(error) == "EXCEPTION"
            assert fired(busy, "service.handler") == 1
        if name == "Generate":
            assert busy.start(24, transfer_id=transfer.id).end().ids == busy.long[:24]
        else:
            step()


# ---- Lost wake-ups, on a node at rest, where nothing else would make the engine look

def test_a_stream_ends_though_no_wake_up_of_the_transfer_table_arrives(lab):
    lab.set("kv.wake=error")
    key = uuid.uuid4().hex
    stream = lab.start(24, rendezvous_key=key)
    time.sleep(0.1)
    transfer = lab.transfer(rendezvous_key=key)
    transfer.write_all()
    transfer.commit()
    stream.end()
    assert stream.error is None and stream.ids == lab.long[:24]
    assert fired(lab, "kv.wake") >= 2


def test_a_lease_ends_though_the_engine_was_not_told_of_it(lab):
    lab.set("kv.wake=error")
    lab.transfer(lease=duration_pb2.Duration(nanos=100_000_000))
    lab.node.wait_until_held(lab.at_rest)
    assert fired(lab, "kv.wake") >= 1


def test_a_stream_ends_though_the_engine_is_never_woken(lab):
    lab.set("engine.wake=error")
    stream = lab.start(24).end()
    assert stream.error is None and stream.ids == lab.long[:24]
    assert fired(lab, "engine.wake") >= 1
    assert lab.node.capacity().running == 0  # capacity() asks the engine


# ---- Admission and steps

@pytest.mark.parametrize("node", ["busy", "lab"])
def test_no_hbm_at_admission_only_delays(node, request):
    lab = request.getfixturevalue(node)
    lab.set("kv.admit=error*3")
    stream = lab.start(24).end()
    assert stream.error is None and stream.ids == lab.long[:24]
    assert fired(lab, "kv.admit") == 3


def test_a_slow_copy_delays_its_own_sequence_alone(busy):
    neighbour = busy.start(LONG)
    neighbour.wait_for_tokens(1)
    busy.set("kv.copy=delay(700ms)*1")
    begin, before = time.monotonic(), len(neighbour.ids)
    victim = busy.start(24)
    victim.wait_for_tokens(1)
    assert time.monotonic() - begin >= 0.7
    assert len(neighbour.ids) - before >= 20, "the neighbour waited for another's copy"
    assert victim.end().ids == busy.long[:24] and fired(busy, "kv.copy") == 1
    neighbour.call.cancel()
    neighbour.end()


def test_a_slow_copy_does_not_hold_up_an_engine_that_has_nothing_else(lab):
    lab.set("kv.copy=delay(3s)*1")
    stream = lab.start(24)
    time.sleep(0.1)
    begin = time.monotonic()
    assert lab.node.capacity().running == 1
    asked = time.monotonic() - begin
    assert not stream.ids and asked < 1.5, f"GetCapacity took {asked:.1f} s"
    assert stream.end().ids == lab.long[:24]


def test_too_many_waiting_is_refused_and_the_transfer_stays(busy):
    transfer_id = committed(busy.node, busy.golden, 0, max_new_tokens=24)
    busy.set("engine.queue=error*1")
    error = busy.start(24, transfer_id=transfer_id).end().error
    assert error.code() == Code.RESOURCE_EXHAUSTED and rpc.reason_of(error) == "TOO_MANY_WAITING"
    assert rpc.retry_seconds(error) > 0 and fired(busy, "engine.queue") == 1
    assert busy.start(24, transfer_id=transfer_id).end().ids == busy.long[:24]


def test_deadlines_and_cancels_end_sequences_whose_steps_take_long(lab):
    lab.set("engine.step=delay(300ms)")
    begin = time.monotonic()
    late = lab.start(LONG, timeout=1)
    cancelled = lab.start(LONG)
    cancelled.wait_for_tokens(1)
    cancelled.call.cancel()
    assert cancelled.end().error.code() == Code.CANCELLED
    assert late.end().error.code() == Code.DEADLINE_EXCEEDED
    assert len(late.ids) < 10
    lab.node.wait_until_held(lab.at_rest)  # it happens within a step or two
    assert time.monotonic() - begin < 10 * SCALE and fired(lab, "engine.step") >= 2


def one_of_three(lab, failpoint):
    """Returns which of three streams `failpoint` ended; the others must not have noticed."""
    lab.set(PACE)
    streams = [lab.start(300) for _ in range(3)]
    for stream in streams:
        stream.wait_for_tokens(1)
    lab.set(failpoint)
    ended = [stream.end() for stream in streams]
    failed = [stream for stream in ended if stream.error is not None]
    assert len(failed) == 1 and fired(lab, failpoint.split("=")[0]) == 1
    assert failed[0].ids == lab.long[:len(failed[0].ids)]
    assert all(stream.ids == lab.long[:300] for stream in ended if stream.error is None)
    return failed[0]


def test_logits_of_nan_end_one_sequence(lab):
    error = one_of_three(lab, "engine.logits=error*1").error
    assert error.code() == Code.INTERNAL and rpc.reason_of(error) == "BAD_LOGITS"


# ---- The way out

def test_a_stream_without_room_is_parked_and_loses_nothing(lab):
    lab.set("decode.sink=error%0.5*30")
    stream = lab.start(200).end()
    assert stream.error is None and stream.ids == lab.long[:200]
    assert fired(lab, "decode.sink") == 30


def test_a_generate_stream_that_breaks_ends_alone(lab):
    assert one_of_three(lab, "decode.reset=error*1").error.code() == Code.CANCELLED


def test_an_admin_handler_that_throws_is_answered(busy):
    busy.set("admin.http=error*1")
    assert busy.node.http("/metrics")[0] == 500
    assert busy.node.http("/metrics")[0] == 200
    assert busy.node.http("/readyz")[0] == 200
    assert fired(busy, "admin.http") == 1


# ---- The clock

def test_a_clock_that_leaps_forward_ends_what_its_time_has_passed(lab):
    lab.set(PACE)
    free = lab.start(LONG, timeout=None)
    bound = lab.start(LONG, timeout=600)
    for stream in (free, bound):
        stream.wait_for_tokens(1)
    transfer = lab.transfer()
    lab.set("clock.jump=jump(2h)*1")
    assert bound.end().error.code() == Code.DEADLINE_EXCEEDED
    lab.wait_for_transfers(0)
    assert error_of(transfer.commit).code() == Code.NOT_FOUND  # its lease of a minute is over
    assert fired(lab, "clock.jump") == 1
    lab.set(clear=True)
    assert free.end().error is None and free.ids == lab.long
    lab.node.wait_until_held(lab.at_rest)
    lab.check_good_request()


def test_a_clock_that_leaps_back_hangs_nothing(busy):
    busy.set("clock.jump=jump(-2h)*1")
    busy.check_good_request()
    assert fired(busy, "clock.jump") == 1
    # Requests that begin after the leap have their own time.
    busy.transfer(lease=duration_pb2.Duration(nanos=200_000_000))
    busy.wait_for_transfers(0)
    assert busy.dram_used() == 0
    late = busy.start(LONG, timeout=0.3).end()
    assert late.error.code() == Code.DEADLINE_EXCEEDED
    assert busy.node.http("/metrics")[0] == 200


# ---- Programs that cannot start

def starts_in_vain(program, model, tmp_path, terms, *flags) -> str:
    """Checks that the program ends with 1 and leaves no address file; returns its output."""
    address_file = tmp_path / "address.json"
    flags = (*flags, "--dram-bytes", "4MiB", "--admin-listen", "127.0.0.1:0") \
        if program == "sluice-server" else flags
    done = run(BIN / program, "--model", model, "--listen", "127.0.0.1:0", "--hbm-bytes", "4MiB",
               "--address-file", address_file, *flags, env={**ENVIRONMENT, "SLUICE_FAILPOINTS": terms})
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert list(tmp_path.iterdir()) == [], "something half-written stays"
    return done.stderr


# ---- CPU workers that attend

MANY = 300  # enough for steps of 5 ms or more, over blocks for which HBM has no room


@pytest.fixture
def workers(tiny_models, start, golden):
    """A node of policy scout with at most four sequences and two workers, two sequences to each worker."""
    if DEVICE != "cpu":
        pytest.skip("operators of sparse attention are the CPU's so far")
    node = start("sluice-server", tiny_models("tiny-qwen3"), "--policy", "scout", "--budget-tokens", "128",
                 "--dense-layers", "0", "--max-sequences", "4", "--max-context", "512", "--hbm-bytes", "64MiB",
                 "--dram-bytes", "64MiB", "--policy-workers", "2", "--policy-worker-deadline-seconds", "2s",
                 "--allow-failpoints")
    lab = Lab(node, golden("tiny-qwen3"), MANY)
    yield lab
    lab.set(clear=True)
    lab.node.wait_until_held(lab.at_rest)
    for stream in [lab.start(24) for _ in range(4)]:
        assert stream.end().error is None and stream.ids == lab.long[:24]
    lab.node.wait_until_held(lab.at_rest)


@pytest.mark.parametrize("term, words, reason", [
    ("attention.worker=error*1", "failed", "failed"),
    ("attention.worker=delay(5s)*1", "did not answer in time", "late"),
    ("attention.worker_exit=error*1", "has died", "left"),
])
def test_a_worker_of_the_cpu_ends_its_own_sequences_alone(workers, term, words, reason):
    workers.set(PACE)
    streams = [workers.start(MANY) for _ in range(4)]
    for stream in streams:
        stream.wait_for_tokens(2)
    workers.set(term)
    for stream in streams:
        stream.end()
    ended = [stream for stream in streams if stream.error is not None]
    assert len(ended) == 2, [stream.error for stream in streams]
    for stream in streams:
        if stream in ended:
            assert stream.error.code() == Code.INTERNAL, stream.error
            assert rpc.reason_of(stream.error) == "WORKER_FAILED" and words in stream.error.details()
            assert stream.ids == workers.long[:len(stream.ids)]
        else:
            assert stream.ids == workers.long
    scrape = Scrape(workers.node)
    assert scrape.get("sluice_attention_worker_failures_total", reason=reason) >= 1
    assert scrape.get("sluice_attention_workers") == (1 if reason == "left" else 2)
    assert scrape.get("sluice_attention_worker_tokens_total") > 0
    assert scrape.get("sluice_requests_total", outcome="error", reason="WORKER_FAILED") == 2
    if reason == "late":
        time.sleep(5)  # the worker comes back


@pytest.mark.parametrize("term, words", [
    ("attention.arbiter=error*1", "failed"),
    ("attention.arbiter_exit=error*1", "has died"),
])
def test_without_its_arbiter_a_node_goes_on_with_its_cpu_workers(tiny_models, start, golden, term, words):
    node = start("sluice-server", tiny_models("tiny-qwen3"), "--policy", "fluxion", "--fluxion-placement", "pull",
                 "--budget-tokens", "64", "--dense-layers", "0", "--block-tokens", "16", "--max-sequences", "4",
                 "--max-context", "512", "--hbm-bytes", "64MiB", "--dram-bytes", "64MiB", "--policy-workers", "2",
                 "--policy-worker-deadline-seconds", "2s", "--allow-failpoints")
    lab = Lab(node, golden("tiny-qwen3"), MANY)
    lab.set(PACE)
    streams = [lab.start(MANY) for _ in range(4)]
    for stream in streams:
        stream.wait_for_tokens(2)
    lab.set(term)
    for stream in streams:
        assert rpc.reason_of(stream.end().error) == "WORKER_FAILED" and words in stream.error.details()
    for stream in [lab.start(24) for _ in range(4)]:
        assert stream.end().error is None and len(stream.ids) == 24
    assert Scrape(node).get("sluice_attention_workers") == 2


@pytest.mark.parametrize("program", ["sluice-server", "sluice-prefill"])
@pytest.mark.parametrize("terms, words", [
    ("device.allocate=error", "no memory for"),
    ("device.allocate=error@20", "no memory for"),
    ("weights.read=error@1", "model.safetensors"),
    ("weights.header=error", "model.safetensors"),
    ("address_file.write=error", "address.json"),
], ids=str)
def test_a_program_that_cannot_start_says_why(tiny_models, tmp_path, program, terms, words):
    said = starts_in_vain(program, tiny_models("tiny-llama"), tmp_path, terms)
    assert words in said.splitlines()[-1], said


def test_a_node_whose_canary_fails_never_becomes_ready(tiny_models, tmp_path):
    said = starts_in_vain("sluice-server", tiny_models("tiny-llama"), tmp_path, "server.canary=error")
    assert "canary" in said.splitlines()[-1] and '"ready"' not in said


def test_a_wrong_term_is_refused_at_start(tiny_models, tmp_path):
    said = starts_in_vain("sluice-server", tiny_models("tiny-llama"), tmp_path, "kv.resrve=error")
    assert "SLUICE_FAILPOINTS" in said and "did you mean kv.reserve?" in said


# ---- A device that fails

def test_a_failing_gpu_ends_every_sequence_and_then_the_node(tiny_models, tmp_path, golden):
    node = Node("sluice-server", tiny_models("tiny-llama"), tmp_path, "--hbm-bytes", "16MiB", "--dram-bytes",
                "16MiB", "--allow-failpoints", "--max-sequences", "2", "--failpoints", PACE)
    try:
        # Two sequences run, one waits for a slot, one for its transfer.
        handoffs = [{"transfer_id": committed(node, golden("tiny-llama"), 0, max_new_tokens=LONG)}
                    for _ in range(3)]
        streams = [Stream(node, sampling=greedy(max_tokens=LONG, ignore_eos=True), **handoff)
                   for handoff in (*handoffs, {"rendezvous_key": "never"})]
        deadline = time.monotonic() + TIMEOUT_S
        while sum(len(s.ids) >= 2 for s in streams) < 2 and time.monotonic() < deadline:
            time.sleep(0.002)
        assert node.http("/readyz")[0] == 200
        node.admin.SetFailpoints(admin_pb2.SetFailpointsRequest(terms="device.failure=error*1"),
                                 timeout=TIMEOUT_S)
        for stream in streams:
            error = stream.end().error
            assert error.code() == Code.INTERNAL and rpc.reason_of(error) == "GPU_FAILED", error
            assert error.details().startswith("the GPU failed: ")
        assert node.process.wait(TIMEOUT_S) == 1
        log = node.log.read_text()
        assert log.splitlines()[-1] == "sluice-server: the GPU failed: failpoint device.failure", log
        assert log.count('"ending: the device failed"') == 1
    finally:
        node.stop()


def test_a_failing_gpu_ends_a_prefill_node(tiny_models, tmp_path):
    # The probe asks a few times a second: the node is ready first, and failed soon after.
    node = Node("sluice-prefill", tiny_models("tiny-llama"), tmp_path, "--hbm-bytes", "8MiB",
                "--failpoints", "device.failure=error@20")
    try:
        assert node.process.wait(TIMEOUT_S) == 1
        last = node.log.read_text().splitlines()[-1]
        assert last == "sluice-prefill: the GPU failed: failpoint device.failure"
    finally:
        node.stop()


# ---- Ending and prefill

def test_a_drain_whose_end_is_lost_ends_by_its_timeout(tiny_models, start, golden):
    node = start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "8MiB", "--dram-bytes", "8MiB",
                 "--failpoints", "server.drain=error", "--drain-timeout-seconds", "0.5s")
    stream = Stream(node, transfer_id=committed(node, golden("tiny-llama"), 0, max_new_tokens=1000),
                    sampling=greedy(max_tokens=1000, ignore_eos=True))
    stream.wait_for_tokens(1)
    begin = time.monotonic()
    node.process.terminate()
    assert node.process.wait(TIMEOUT_S) == 0
    assert 0.4 < time.monotonic() - begin < 20 * SCALE
    assert stream.end().error is None or stream.error.code() == Code.UNAVAILABLE
    assert '"everything_finished":false' in node.log.read_text().replace(" ", "")


def test_a_prefill_node_answers_whatever_its_workers_meet(lab, tiny_models, start):
    node = start("sluice-prefill", tiny_models("tiny-llama"), "--hbm-bytes", "8MiB", "--failpoints",
                 "service.queue=error*1;service.handler=error*1;prefill.push=error*1@1")
    prompt = lab.golden.prompt(0)

    def prefill() -> prefill_pb2.RunResponse:
        return node.prefill.Run(prefill_pb2.RunRequest(
            prompt_token_ids=prompt, decode_address=lab.node.address,
            sampling=greedy(max_tokens=24), skip_first_token=True), timeout=TIMEOUT_S)

    full = error_of(prefill)
    assert full.code() == Code.RESOURCE_EXHAUSTED and rpc.reason_of(full) == "QUEUE_FULL"
    assert rpc.retry_seconds(full) > 0
    thrown = error_of(prefill)
    assert thrown.code() == Code.INTERNAL and rpc.reason_of(thrown) == "EXCEPTION"
    assert "service.handler" in thrown.details()
    lab.node.wait_until_held(lab.at_rest)
    # The stream breaks while a layer is sent, and Run goes on with a second stream.
    for _ in range(2):
        answer = prefill()
        assert lab.start(24, transfer_id=answer.transfer_id).end().ids == lab.long[:24]
    assert node.log.read_text().count("a push broke") == 1


# ---- The doors

def test_only_a_node_that_allows_it_lets_itself_be_broken(small, lab):
    request = admin_pb2.SetFailpointsRequest(terms="kv.reserve=error")
    error = error_of(lambda: small.admin.SetFailpoints(request, timeout=TIMEOUT_S))
    assert error.code() == Code.FAILED_PRECONDITION
    assert rpc.reason_of(error) == "FAILPOINTS_NOT_ALLOWED" and "--allow-failpoints" in error.details()
    listing = small.admin.ListFailpoints(admin_pb2.ListFailpointsRequest(), timeout=TIMEOUT_S)
    assert not listing.allowed and not any(p.armed or p.hits for p in listing.failpoints)
    assert lab.node.admin.ListFailpoints(admin_pb2.ListFailpointsRequest(), timeout=TIMEOUT_S).allowed


@pytest.mark.parametrize("terms, words", [
    ("kv.resrve=error", "did you mean kv.reserve?"), ("kv.reserve", "NAME=ACTION"),
    ("kv.copy=error", "delay(50ms), kill or off"), ("kv.reserve=error;kv.copy=x", "kv.copy=x"),
    ("x" * 5000, "4096"),
], ids=lambda v: v[:20])
def test_a_wrong_term_is_refused_by_what_is_right(lab, terms, words):
    error = error_of(lambda: lab.set(terms))
    assert error.code() == Code.INVALID_ARGUMENT and words in error.details()
    assert [v.field for v in rpc.details_of(error)["BadRequest"].field_violations] == ["terms"]
    assert not lab.state("kv.reserve").armed


def test_the_tool_lists_sets_and_clears(lab):
    flags = ["--decode", lab.node.address]
    done = run(SLUICE, "failpoint", "set", *flags, "kv.reserve=error*7", "kv.copy=delay(1ms)")
    assert done.returncode == 0, done.stderr
    assert lab.state("kv.reserve").armed and lab.state("kv.copy").term == "kv.copy=delay(1ms)"
    listed = run(SLUICE, "failpoint", "list", *flags).stdout
    assert re.search(r"^kv\.reserve +Reserve finds no room", listed, re.MULTILINE)
    assert "kv.reserve=error*7: armed, 0 hits" in listed
    assert run(SLUICE, "failpoint", "clear", *flags).returncode == 0
    assert not lab.state("kv.reserve").armed
    wrong = run(SLUICE, "failpoint", "set", *flags, "kv.resrve=error")
    assert wrong.returncode == 1 and "did you mean kv.reserve?" in wrong.stderr
    assert run(SLUICE, "failpoint", "set", *flags).returncode == 2


def test_every_failpoint_is_armed_by_a_test(lab):
    answer = lab.node.admin.ListFailpoints(admin_pb2.ListFailpointsRequest(), timeout=TIMEOUT_S)
    text = "".join(p.read_text() for p in [*TESTS.glob("e2e/*.py"), *TESTS.glob("unit/**/*_test.cc")])
    assert len(answer.failpoints) >= 20
    for point in answer.failpoints:
        assert f'"{point.name}=' in text or f";{point.name}=" in text, f"no test arms {point.name}"
        assert point.effect and point.survives
