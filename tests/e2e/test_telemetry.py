"""OpenTelemetry: a collector gets the spans of a request from the nodes that it passes, below its caller's span."""

import time
import uuid

import grpc
import pytest
from sluice.v1 import decode_pb2, prefill_pb2
from support.collector import Collector, stubs
from support.metrics_text import Scrape, wait_for
from support.nodes import BIN, FIXTURES, SCALE, TIMEOUT_S, error_of, free_port, greedy, run, tokens_of
from support.pki import Pki, node_flags, token_entry, write_access
from support.vllm_client import HOLD, answer_of, request, stub

SMALL = ["--hbm-bytes", "4MiB"]
DRAM = ["--dram-bytes", "6MiB"]
PROMPT = [1 + i for i in range(40)]
SERVER_KIND = 2


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    return stubs(tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="module")
def collector(modules):
    made = Collector(modules)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def pair(tiny_models, start, collector):
    traced = ["--otlp-endpoint", collector.address]
    return (start("sluice-server", tiny_models("tiny-llama"), *SMALL, *DRAM, *traced),
            start("sluice-prefill", tiny_models("tiny-llama"), *SMALL, *traced))


def caller(flags: str = "01") -> tuple[str, str, list]:
    """Returns a trace, the caller's span, and the metadata that says so."""
    trace, span = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    return trace, span, [("traceparent", f"00-{trace}-{span}-{flags}"), ("tracestate", "a=1"),
                         ("x-request-id", f"chatcmpl-{trace}")]


def generate(node, metadata=(), tokens=6, **request):
    return tokens_of(node.decode.Generate(decode_pb2.GenerateRequest(
        sampling=greedy(max_tokens=tokens, ignore_eos=True), **request), timeout=TIMEOUT_S, metadata=metadata))


def check_below(collector, own, trace, parent):
    """Checks that a call's span is the caller's child and that its parts lie in it; returns the parts' names."""
    assert (own.trace, own.parent, own.kind, own.tracestate) == (trace, parent, SERVER_KIND, "a=1")
    parts = collector.spans(parent=own.id)
    for part in parts:
        assert part.trace == trace and part.service == own.service
        assert own.begin <= part.begin <= part.end
    # The time behind the sequence's end, such as a slow reader's, is the call's alone. The clocks of engine and call are
    # not read at once.
    assert max(part.end for part in parts) <= own.end + 5_000_000
    assert abs(time.time() - own.end / 1e9) < 3600
    return [part.name for part in sorted(parts, key=lambda part: (part.begin, part.end))]


def test_a_pushed_request_has_spans_of_both_nodes_below_its_callers(pair, collector):
    decode, prefill = pair
    trace, parent, metadata = caller()
    answer = prefill.prefill.Run(prefill_pb2.RunRequest(
        prompt_token_ids=PROMPT, decode_address=decode.address, sampling=greedy(max_tokens=6)), timeout=TIMEOUT_S,
        metadata=metadata)
    name = f"r-{uuid.uuid4().hex}"
    generate(decode, metadata, transfer_id=answer.transfer_id, request_id=name)
    own = collector.wait_for(name="generate", trace=trace)
    assert own.service == "sluice-server" and not own.failed
    parts = check_below(collector, own, trace, parent)
    assert parts[:2] == ["transfer", "queue"] and parts[-1] == "decode" and set(parts) <= {
        "transfer", "queue", "warm_up", "decode"}  # its first token was handed over
    have = own.attributes
    assert have["gen_ai.request.id"] == name and have["sluice.x_request_id"] == f"chatcmpl-{trace}"
    assert have["gen_ai.usage.prompt_tokens"] == len(PROMPT) and have["gen_ai.usage.completion_tokens"] == 6
    assert have["gen_ai.request.max_tokens"] == 6 and have["gen_ai.request.temperature"] == 0
    assert 0 <= have["gen_ai.latency.time_in_queue"] <= have["gen_ai.latency.e2e"] < TIMEOUT_S
    assert have["sluice.transfer_id"] == answer.transfer_id and have["sluice.reason"] == "MAX_TOKENS"
    computed = collector.wait_for(name="prefill", trace=trace)
    assert computed.service == "sluice-prefill"
    assert set(check_below(collector, computed, trace, parent)) == {"queue", "first_token", "transfer"}
    assert computed.attributes["sluice.transfer_id"] == answer.transfer_id
    # The stream by which the decode node got the KV belongs to the same request.
    written = collector.wait_for(name="transfer.write", trace=trace)
    assert (written.service, written.parent) == ("sluice-server", parent)
    assert written.attributes["sluice.bytes"] == computed.attributes["sluice.bytes"] > 0


def test_a_pulled_request_has_a_pull_at_one_node_and_a_read_at_the_other(pair, collector):
    decode, prefill = pair
    trace, parent, metadata = caller()
    held = prefill.prefill.Run(prefill_pb2.RunRequest(prompt_token_ids=PROMPT, sampling=greedy(max_tokens=1)),
                               timeout=TIMEOUT_S, metadata=metadata)
    generate(decode, metadata, source=held.source, prompt_token_ids=PROMPT)
    own = collector.wait_for(name="generate", trace=trace)
    parts = check_below(collector, own, trace, parent)
    assert parts[:2] == ["pull", "queue"] and parts[-1] == "decode"
    read = collector.wait_for(name="pull.read", trace=trace)
    assert (read.service, read.parent) == ("sluice-prefill", parent) and read.attributes["sluice.bytes"] > 0


def test_both_legs_of_a_gateways_request_are_in_its_trace(pair, collector):
    decode, prefill = pair
    trace, parent, metadata = caller()
    name = f"legs-{trace}"

    def leg(node, tokens, parameters):
        return answer_of(stub(node).Generate(
            request(PROMPT, {"max_tokens": tokens, "ignore_eos": True}, request_id=name,
                    kv_transfer_params_json=parameters), timeout=TIMEOUT_S, metadata=metadata)).complete

    first = leg(prefill, 1, HOLD)
    leg(decode, 6, first.kv_transfer_params_json)
    held = collector.wait_for(name="generate", trace=trace, service="sluice-prefill")
    assert check_below(collector, held, trace, parent) == ["queue", "first_token", "decode"]
    own = collector.wait_for(name="generate", trace=trace, service="sluice-server")
    assert check_below(collector, own, trace, parent)[:2] == ["pull", "queue"]
    for span in (held, own):
        assert span.attributes["gen_ai.request.id"] == name
        assert span.attributes["rpc.method"] == "vllm.grpc.engine.VllmEngine/Generate"


def test_what_the_caller_does_not_trace_is_not_traced(pair, collector):
    decode, prefill = pair
    quiet, _, silent = caller(flags="00")
    loud, _, metadata = caller()
    for headers in (silent, metadata):
        held = prefill.prefill.Run(prefill_pb2.RunRequest(prompt_token_ids=PROMPT, sampling=greedy(max_tokens=1)),
                                   timeout=TIMEOUT_S, metadata=headers)
        generate(decode, headers, source=held.source, prompt_token_ids=PROMPT)
    collector.wait_for(name="generate", trace=loud)
    collector.wait_for(name="prefill", trace=loud)
    assert not collector.spans(trace=quiet)


def test_a_request_without_a_trace_begins_one_and_an_error_says_so(pair, collector):
    decode, _ = pair
    name = f"r-{uuid.uuid4().hex}"
    error_of(lambda: generate(decode, transfer_id="0" * 32, request_id=name))
    deadline = time.monotonic() + 20 * SCALE
    while not (found := [s for s in collector.spans(name="generate") if s.attributes.get("gen_ai.request.id") == name]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (own,) = found
    assert own.parent == "" and len(own.trace) == 32
    assert own.failed and own.error == "NOT_FOUND TRANSFER_NOT_FOUND"


def test_spans_are_counted_and_a_node_that_stops_sends_its_last(tiny_models, start, modules):
    collector = Collector(modules)
    node = start("sluice-server", tiny_models("tiny-llama"), *SMALL, *DRAM, "--local-prefill", "always",
                 "--otlp-endpoint", collector.address)
    trace, _, metadata = caller()
    generate(node, metadata, prompt_token_ids=PROMPT)
    collector.wait_for(name="first_token", trace=trace)
    wait_for(node, lambda m: m.get("sluice_otel_spans_exported_total") >= 4, 10 * SCALE)
    assert Scrape(node).get("sluice_otel_spans_exported_total") == len(collector.spans())
    last, _, metadata = caller()
    generate(node, metadata, prompt_token_ids=PROMPT)
    assert node.stop() == 0
    assert {"generate", "queue", "first_token", "decode"} <= {s.name for s in collector.spans(trace=last)}
    collector.stop()


def test_no_call_waits_for_a_collector_that_is_not_there_and_it_gets_the_spans_when_it_comes(tiny_models, start,
                                                                                            modules):
    address = f"127.0.0.1:{free_port()}"
    node = start("sluice-server", tiny_models("tiny-llama"), *SMALL, *DRAM, "--local-prefill", "always",
                 "--otlp-endpoint", address)
    trace, _, metadata = caller()
    begin = time.monotonic()
    for _ in range(20):
        generate(node, metadata, tokens=2, prompt_token_ids=PROMPT)
    assert time.monotonic() - begin < 20 * SCALE
    late = Collector(modules, address=address)
    late.wait_for(name="generate", trace=trace)
    assert Scrape(node).get("sluice_otel_spans_dropped_total") == 0
    late.stop()


def test_a_node_whose_collector_takes_nothing_stops_in_time(tiny_models, start):
    node = start("sluice-server", tiny_models("tiny-llama"), *SMALL, *DRAM, "--local-prefill", "always",
                 "--otlp-endpoint", f"127.0.0.1:{free_port()}")
    generate(node, caller()[2], prompt_token_ids=PROMPT)
    begin = time.monotonic()
    assert node.stop() == 0
    assert time.monotonic() - begin < 8 * SCALE


def test_over_tls_the_collector_is_checked_and_sees_the_nodes_certificate(tiny_models, start, modules, tmp_path):
    pki, token = Pki(tmp_path / "pki"), f"secret-{uuid.uuid4().hex}"
    access = write_access(tmp_path / "access.json", tokens=[token_entry("alice", token, "router")])
    cert, key = pki.issue("collector")
    certificates = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())],
                                               root_certificates=pki.ca.read_bytes(), require_client_auth=True)
    collector = Collector(modules, certificates)
    node = start("sluice-server", tiny_models("tiny-llama"), *node_flags(pki, access, "node"), *SMALL, *DRAM,
                 "--local-prefill", "always", "--otlp-endpoint", collector.address, "--otlp-tls", "on",
                 credentials=pki.bearer(token))
    trace, _, metadata = caller()
    generate(node, metadata, prompt_token_ids=PROMPT)
    collector.wait_for(name="generate", trace=trace)
    collector.stop()


@pytest.mark.parametrize(("flag", "value", "says"), [
    ("--otlp-endpoint", "collector", "otlp_endpoint"),
    ("--otlp-endpoint", "127.0.0.1:0", "otlp_endpoint: port 0 cannot be called"),
    ("--otlp-tls", "perhaps", "otlp_tls"),
    ("--otlp-sample-ratio", "1.5", "otlp_sample_ratio"),
])
def test_a_bad_setting_is_refused_by_its_name(flag, value, says):
    done = run(BIN / "sluice-prefill", "--model", FIXTURES / "tiny-llama", "--listen", "127.0.0.1:0", flag, value)
    assert done.returncode == 1 and says in done.stderr, done.stderr
