"""The access log has one JSON line for each call, with the router's ids and a trace's ids from prefill to decode."""

import json
import time
import uuid

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sluice.v1 import admin_pb2, decode_pb2, prefill_pb2
from sluice_client import rpc
from support.metrics_text import Scrape
from support.nodes import BIN, FIXTURES, SCALE, TIMEOUT_S, error_of, greedy, run, tokens_of
from support.pki import Pki, node_flags, token_entry, write_access
from support.transfers import Transfer, committed

MEMBERS = {"time", "level", "message", "method", "peer", "identity", "tenant", "request_id", "x_request_id",
           "trace_id", "transfer_id", "status", "reason", "queue_seconds", "first_token_seconds", "total_seconds",
           "prompt_tokens", "cached_tokens", "output_tokens", "bytes", "dropped"}
GENERATE = "/sluice.v1.Decode/Generate"


class Log:
    """The access log of a node."""

    def __init__(self, path):
        self.path = path

    def lines(self) -> list[dict]:
        if not self.path.exists():
            return []
        text = self.path.read_text()
        return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]

    def wait_for(self, **members) -> dict:
        deadline = time.monotonic() + 10 * SCALE
        while time.monotonic() < deadline:
            for line in self.lines():
                if members.items() <= line.items():
                    return line
            time.sleep(0.02)
        raise AssertionError(f"no line with {members}:\n{self.path.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def logged(tiny_models, start, tmp_path_factory):
    """(decode node, prefill node, their access logs)"""
    folder = tmp_path_factory.mktemp("logs")
    logs = [Log(folder / name) for name in ("decode.log", "prefill.log")]
    small = ["--hbm-bytes", "4MiB"]
    decode = start("sluice-server", tiny_models("tiny-llama"), *small, "--dram-bytes", "6MiB", "--access-log",
                   str(logs[0].path))
    prefill = start("sluice-prefill", tiny_models("tiny-llama"), *small, "--access-log", str(logs[1].path))
    return decode, prefill, *logs


def traceparent() -> tuple[str, str]:
    trace = uuid.uuid4().hex
    return trace, f"00-{trace}-{uuid.uuid4().hex[:16]}-01"


def generate(node, transfer_id, metadata=(), **request):
    return node.decode.Generate(decode_pb2.GenerateRequest(transfer_id=transfer_id, **request), timeout=TIMEOUT_S,
                                metadata=metadata)


def test_a_generate_has_one_line_with_its_ids_and_figures(logged, golden):
    node, _, log, _ = logged
    name, router = f"r-{uuid.uuid4().hex}", f"chatcmpl-{uuid.uuid4().hex}"
    trace, parent = traceparent()
    transfer = committed(node, golden("tiny-llama"))
    tokens_of(generate(node, transfer, [("x-request-id", router), ("traceparent", parent)], request_id=name,
                       sampling=greedy(max_tokens=7, ignore_eos=True)))
    line = log.wait_for(request_id=name)
    assert set(line) == MEMBERS
    assert (line["method"], line["status"], line["reason"]) == (GENERATE, "OK", "MAX_TOKENS")
    assert (line["x_request_id"], line["trace_id"], line["transfer_id"]) == (router, trace, transfer)
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (33, 33, 7)
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["total_seconds"] < TIMEOUT_S
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert sum(other["request_id"] == name for other in log.lines()) == 1
    # The calls of the transfer itself.
    wrote = log.wait_for(method="/sluice.v1.KvIngest/Write", transfer_id=transfer)
    assert wrote["bytes"] > 0 and wrote["status"] == "OK"
    for method in ("Reserve", "Commit"):
        log.wait_for(method=f"/sluice.v1.KvIngest/{method}", transfer_id=transfer, status="OK")


def test_a_refused_call_has_its_line_and_no_value_of_its_fields(logged):
    node, _, log, _ = logged
    name = uuid.uuid4().hex
    error_of(lambda: node.decode.Generate(decode_pb2.GenerateRequest(
        request_id=name, prompt_token_ids=[1, 434343], sampling=greedy(max_tokens=1)), timeout=TIMEOUT_S))
    line = log.wait_for(request_id=name)
    assert line["status"] == "INVALID_ARGUMENT" and line["output_tokens"] == 0
    assert "434343" not in log.path.read_text()


def test_a_cancelled_call_says_so(logged, golden):
    node, _, log, _ = logged
    name = uuid.uuid4().hex
    transfer = Transfer(node, golden("tiny-llama"))
    stream = generate(node, transfer.id, request_id=name, sampling=greedy(max_tokens=5))
    while not any(s.request_id == name for s in node.admin.ListSequences(
            admin_pb2.ListSequencesRequest(), timeout=TIMEOUT_S).sequences):
        time.sleep(0.01)
    stream.cancel()
    line = log.wait_for(request_id=name)
    assert (line["status"], line["reason"], line["output_tokens"]) == ("CANCELLED", "CALLER_GONE", 0)


@pytest.mark.parametrize("headers", [
    [("traceparent", "00-" + "0" * 32 + "-b7ad6b7169203331-01")],
    [("traceparent", "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")],
    [("traceparent", "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01")],
    [("x-request-id", "x" * 129)],
    [("x-request-id", "two words")],
])
def test_a_malformed_header_is_dropped_and_counted_and_the_call_goes_on(logged, golden, headers):
    node, _, log, _ = logged
    before = Scrape(node)
    name = uuid.uuid4().hex
    assert len(tokens_of(generate(node, committed(node, golden("tiny-llama")), headers, request_id=name,
                                  sampling=greedy(max_tokens=2, ignore_eos=True)))) == 2
    line = log.wait_for(request_id=name)
    assert line["trace_id"] == line["x_request_id"] == ""
    counter = "sluice_malformed_trace_headers_total"
    assert Scrape(node).get(counter) - before.get(counter) == 1


def test_a_prompts_trace_goes_on_from_prefill_to_decode(logged, golden):
    decode, prefill, decode_log, prefill_log = logged
    trace, parent = traceparent()
    router = f"chatcmpl-{uuid.uuid4().hex}"
    stub = prefill.prefill
    stub.Run(prefill_pb2.RunRequest(prompt_token_ids=[1, 2, 3, 4], decode_address=decode.address,
                                    sampling=greedy(max_tokens=2)),
             timeout=TIMEOUT_S, metadata=[("traceparent", parent), ("tracestate", "a=1,b=2"),
                                          ("x-request-id", router)])
    ran = prefill_log.wait_for(method="/sluice.v1.Prefill/Run", trace_id=trace)
    assert ran["prompt_tokens"] == 4 and ran["bytes"] > 0 and ran["output_tokens"] == 1
    for method in ("Reserve", "Write", "Commit"):
        line = decode_log.wait_for(method=f"/sluice.v1.KvIngest/{method}", trace_id=trace)
        assert line["x_request_id"] == router and line["transfer_id"] == ran["transfer_id"]


def test_a_renamed_log_is_opened_anew(logged, golden):
    node, _, log, _ = logged
    rotated = log.path.with_suffix(".1")
    before = len(log.lines())
    log.path.rename(rotated)
    time.sleep(1)
    name = uuid.uuid4().hex
    tokens_of(generate(node, committed(node, golden("tiny-llama")), request_id=name,
                       sampling=greedy(max_tokens=1)))
    log.wait_for(request_id=name)
    assert len(Log(rotated).lines()) >= before
    assert not any(line["request_id"] == name for line in Log(rotated).lines())


def test_health_checks_have_no_line(logged):
    node, _, log, _ = logged
    health_pb2_grpc.HealthStub(node.channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    with pytest.raises(grpc.RpcError):
        node.channel.unary_unary("/sluice.v1.Decode/Nothing")(b"", timeout=TIMEOUT_S)
    error_of(lambda: node.decode.Generate(decode_pb2.GenerateRequest(request_id="last"), timeout=TIMEOUT_S))
    log.wait_for(request_id="last")
    assert not any(line["method"].startswith("/grpc.") for line in log.lines())


def test_a_log_that_cannot_be_opened_ends_the_program_at_start():
    done = run(BIN / "sluice-prefill", "--model", FIXTURES / "tiny-llama", "--listen", "127.0.0.1:0", "--access-log",
               "/no/such/folder/log")
    assert done.returncode == 1
    assert "access_log: cannot append to /no/such/folder/log: No such file or directory" in done.stderr


def test_over_tls_a_line_says_who_called_and_for_whom_and_never_with_what(tiny_models, start, tmp_path):
    pki, log, token = Pki(tmp_path / "pki"), Log(tmp_path / "access.log"), f"secret-{uuid.uuid4().hex}"
    access = write_access(tmp_path / "access.json", tokens=[token_entry("alice", token, "router", tenant="blue")])
    node = start("sluice-server", tiny_models("tiny-llama"), *node_flags(pki, access, "node"), "--hbm-bytes", "4MiB",
                 "--dram-bytes", "6MiB", "--access-log", str(log.path), credentials=pki.bearer(token))
    name = uuid.uuid4().hex
    error_of(lambda: node.decode.Generate(decode_pb2.GenerateRequest(
        request_id=name, transfer_id="0" * 32, sampling=greedy(max_tokens=1)), timeout=TIMEOUT_S))
    line = log.wait_for(request_id=name)
    assert (line["identity"], line["tenant"]) == ("token:alice", "blue")
    assert line["status"] == "NOT_FOUND" and line["reason"] == "TRANSFER_NOT_FOUND"
    # A caller whom the access file refuses has a line as well, whatever method it calls.
    wrong, cancel = f"wrong-{uuid.uuid4().hex}", "/sluice.v1.Decode/Cancel"
    for credentials, method in ((pki.bearer(token), "/sluice.v1.Admin/Resume"), (pki.bearer(wrong), GENERATE),
                                (pki.credentials("stranger"), cancel), (pki.bearer(wrong), "/x/" + "y" * 4000)):
        with rpc.open_channel(node.address, credentials) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(method)(b"", timeout=TIMEOUT_S)
    refused = log.wait_for(method="/sluice.v1.Admin/Resume", status="PERMISSION_DENIED")
    assert set(refused) == MEMBERS and (refused["identity"], refused["tenant"]) == ("token:alice", "blue")
    assert log.wait_for(method=GENERATE, status="UNAUTHENTICATED")["identity"] == ""
    assert log.wait_for(method=cancel, status="PERMISSION_DENIED")["identity"] == "cn:stranger"
    log.wait_for(method="/x/" + "y" * 253, status="UNAUTHENTICATED")
    assert token not in log.path.read_text() and wrong not in log.path.read_text()
