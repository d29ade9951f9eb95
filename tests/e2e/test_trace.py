"""Admin.Trace: the last steps as a file for Perfetto, with the ids of the requests that were in them."""

import json
import uuid

import pytest
from sluice.v1 import admin_pb2, decode_pb2
from sluice_client import rpc
from support.nodes import SLUICE, TIMEOUT_S, error_of, greedy, run, tokens_of
from support.transfers import committed

SMALL = ["--hbm-bytes", "4MiB", "--dram-bytes", "6MiB"]


@pytest.fixture(scope="module")
def node(tiny_models, start):
    return start("sluice-server", tiny_models("tiny-llama"), *SMALL, "--trace-steps", "32")


def traced(node, steps=0) -> list[dict]:
    """Returns the events of the file."""
    pieces = [piece.json for piece in node.admin.Trace(admin_pb2.TraceRequest(steps=steps), timeout=TIMEOUT_S)]
    assert all(0 < len(piece) <= 1 << 20 for piece in pieces)
    return json.loads(b"".join(pieces))["traceEvents"]


def slices(events, category) -> list[dict]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]


def generate(node, golden, tokens, metadata=(), **request) -> str:
    name = f"r-{uuid.uuid4().hex}"
    tokens_of(node.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=committed(node, golden("tiny-llama")), request_id=name,
        sampling=greedy(max_tokens=tokens, ignore_eos=True), **request), timeout=TIMEOUT_S, metadata=metadata))
    return name


def test_the_last_steps_have_their_phases_and_the_requests_in_them(node, golden):
    trace_id = uuid.uuid4().hex
    name = generate(node, golden, 20, [("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),
                                       ("x-request-id", "chatcmpl-1")])
    events = traced(node)
    steps = slices(events, "step")
    numbers = [step["args"]["number"] for step in steps]
    assert 20 <= len(steps) <= 32 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert {phase["name"] for phase in slices(events, "host")} == {"plan", "launch", "emit", "turn", "wait"}
    assert {part["name"] for part in slices(events, "device")} == {"copy", "compute", "sample"}
    life = [stage for stage in slices(events, "sequence") if stage["args"]["request_id"] == name]
    assert [stage["name"] for stage in life][-2:] == ["queued", "running"]
    for stage in life:
        assert stage["args"]["trace_id"] == trace_id and stage["args"]["x_request_id"] == "chatcmpl-1"
    # The steps of the sequence lie within the time in which it ran.
    running = life[-1]
    assert running["ts"] <= steps[-1]["ts"] and running["dur"] > 0
    assert len(traced(node, steps=3)) < len(events)
    assert len(slices(traced(node, steps=3), "step")) == 3


def test_slices_of_a_thread_nest_or_follow_each_other(node, golden):
    generate(node, golden, 24)
    lanes = {}
    for event in traced(node):
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    assert len(lanes) >= 4
    for lane in lanes.values():
        open_until = []
        for event in sorted(lane, key=lambda e: (e["ts"], -e["dur"])):
            begin, end = event["ts"], event["ts"] + event["dur"]
            while open_until and open_until[-1] <= begin + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, event
            open_until.append(end)


def test_a_trace_has_no_tokens_of_a_prompt(node, golden):
    generate(node, golden, 2)
    known = {"name", "ph", "pid", "tid", "ts", "dur", "cat", "args"}
    arguments = {"name", "number", "rows", "sequences", "request_id", "x_request_id", "trace_id", "sequence_id"}
    for event in traced(node):
        assert set(event) <= known and set(event.get("args", {})) <= arguments


def test_the_command_writes_the_file(node, golden, tmp_path):
    generate(node, golden, 8)
    out = tmp_path / "trace.json"
    done = run(SLUICE, "trace", "--decode", node.address, "--steps", 5, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "5 steps" in done.stdout
    assert len(slices(json.loads(out.read_text())["traceEvents"], "step")) == 5
    done = run(SLUICE, "trace", "--decode", node.address, "--out", tmp_path / "no" / "trace.json")
    assert done.returncode == 1 and "cannot write" in done.stderr


def test_a_node_that_keeps_no_steps_says_so(tiny_models, start):
    node = start("sluice-server", tiny_models("tiny-llama"), *SMALL, "--trace-steps", "0")
    error = error_of(lambda: node.admin.Trace(admin_pb2.TraceRequest(), timeout=TIMEOUT_S))
    assert "--trace-steps 0" in error.details()
    assert error.code().name == "FAILED_PRECONDITION"
    assert rpc.explain(error, node.address)
