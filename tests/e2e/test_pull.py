"""A decode node reads the caches that a prefill node holds: KvSource, and the ways a pull ends."""

import hashlib
import signal
import struct
import threading
import time
from concurrent import futures

import grpc
import pytest
from sluice.v1 import decode_pb2, prefill_pb2, source_pb2, source_pb2_grpc
from sluice_client import rpc
from support.metrics_text import wait_for
from support.nodes import BIN, SCALE, SLUICE, TIMEOUT_S, error_of, greedy, run, sluice_json, tokens_of

IDLE_S = 1.0 * SCALE


def digest_of(ids) -> str:
    return hashlib.sha256(b"".join(struct.pack("<I", i) for i in ids)).hexdigest()


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models("tiny-llama")


@pytest.fixture(scope="module")
def decode(start, model):
    return start("sluice-server", model, "--hbm-bytes", "16MiB", "--dram-bytes", "16MiB",
                 "--pull-idle-seconds", f"{IDLE_S}s", "--max-chunk-bytes", "64KiB")


@pytest.fixture(scope="module")
def prefill(start, model):
    return start("sluice-prefill", model, "--hbm-bytes", "16MiB", "--hold-seconds", "30s")


class Case:
    """A prompt, and the tokens that it decodes to where its caches are pushed."""

    def __init__(self, decode, prefill, prompt):
        self.prompt = prompt
        sampling = greedy(max_tokens=24, ignore_eos=True)
        pushed = prefill.prefill.Run(prefill_pb2.RunRequest(prompt_token_ids=prompt, sampling=sampling,
                                                            decode_address=decode.address), timeout=TIMEOUT_S)
        tokens, _ = tokens_of(decode.decode.Generate(decode_pb2.GenerateRequest(
            transfer_id=pushed.transfer_id, sampling=sampling), timeout=TIMEOUT_S))
        self.tokens = [token.id for token in tokens]


@pytest.fixture(scope="module")
def g(decode, prefill):
    return Case(decode, prefill, [(i * 37) % 250 + 3 for i in range(200)])


@pytest.fixture(autouse=True)
def unharmed(decode):
    before = decode.settled()
    yield
    decode.wait_until_held(before)


def hold(prefill, prompt) -> source_pb2.KvSourceRef:
    return prefill.prefill.Run(prefill_pb2.RunRequest(prompt_token_ids=prompt, sampling=greedy(max_tokens=1)),
                               timeout=TIMEOUT_S).source


def generate(decode, source, prompt, tokens=8, **more) -> list[int]:
    request = decode_pb2.GenerateRequest(source=source, prompt_token_ids=prompt, sampling=greedy(max_tokens=tokens), **more)
    found, _ = tokens_of(decode.decode.Generate(request, timeout=TIMEOUT_S))
    return [token.id for token in found]


def refusal(decode, source, prompt, **more) -> tuple[str, str, str]:
    """Returns code, reason and message of a Generate that fails."""
    error = error_of(lambda: generate(decode, source, prompt, **more))
    return error.code().name, rpc.reason_of(error), error.details()


def source_stub(node) -> source_pb2_grpc.KvSourceStub:
    return source_pb2_grpc.KvSourceStub(node.channel)


def test_what_is_read_decodes_as_what_is_pushed(decode, prefill, g):
    source = hold(prefill, g.prompt)
    assert source.address == prefill.address
    assert source.prompt_digest == digest_of(g.prompt)
    assert generate(decode, source, g.prompt, tokens=24) == g.tokens
    # A prompt is given back once it has been read.
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            source_stub(prefill).Describe(source_pb2.DescribeRequest(source_id=source.source_id), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.NOT_FOUND
            break
    assert refusal(decode, source, g.prompt)[:2] == ("NOT_FOUND", "SOURCE_NOT_FOUND")


def test_tools_sluice_pulls(decode, prefill, g):
    flags = ["generate", "--decode", decode.address, "--prompt-ids", ",".join(map(str, g.prompt)), "--max-tokens", 24,
             "--ignore-eos"]
    pulled = sluice_json(*flags, "--prefill", prefill.address, "--pull")
    assert pulled["output_ids"] == g.tokens
    done = run(SLUICE, *flags, "--pull")
    assert done.returncode == 2 and "--prefill" in done.stderr


def test_another_prompt_is_refused_before_anything_is_read(decode, prefill, g):
    source = hold(prefill, g.prompt)
    other = [g.prompt[0] ^ 1, *g.prompt[1:]]
    code, _, message = refusal(decode, source, other)
    assert code == "INVALID_ARGUMENT" and "prompt_token_ids" in message
    source.prompt_digest = ""  # then the source itself refuses
    assert refusal(decode, source, other)[:2] == ("FAILED_PRECONDITION", "SOURCE_MISMATCH")


def test_a_full_node_says_when_to_come_again(model, g, start):
    prefill = start("sluice-prefill", model, "--hold-bytes", "1MiB")
    held = []
    with pytest.raises(grpc.RpcError) as caught:
        for _ in range(10_000):
            held.append(hold(prefill, g.prompt))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert rpc.reason_of(caught.value) == "HOLD_FULL"
    assert held
    for source in held:
        assert source_stub(prefill).Release(source_pb2.ReleaseRequest(source_id=source.source_id),
                                            timeout=TIMEOUT_S).found
    again = hold(prefill, g.prompt)
    assert source_stub(prefill).Release(source_pb2.ReleaseRequest(source_id=again.source_id)).found
    assert not source_stub(prefill).Release(source_pb2.ReleaseRequest(source_id=again.source_id)).found


def test_a_lease_that_is_not_renewed_ends(start, model, decode, g):
    lease_s = 1.0 * SCALE  # far more than a busy machine leaves between two renewals
    short = start("sluice-prefill", model, "--hold-seconds", f"{lease_s}s")
    source, kept = hold(short, g.prompt), hold(short, g.prompt)
    end = time.monotonic() + 2 * lease_s
    while time.monotonic() < end:
        source_stub(short).Renew(source_pb2.RenewRequest(source_id=kept.source_id), timeout=TIMEOUT_S)
        time.sleep(0.05)
    assert refusal(decode, source, g.prompt)[:2] == ("NOT_FOUND", "SOURCE_NOT_FOUND")
    assert generate(decode, kept, g.prompt, tokens=4) == g.tokens[:4]


@pytest.mark.parametrize("terms", ["source.reset=error*1@1", "source.checksum=error*1@2"])
def test_a_pull_that_breaks_once_goes_on_over_another_connection(start, model, decode, g, terms):
    faulty = start("sluice-prefill", model, "--failpoints", terms)
    assert generate(decode, hold(faulty, g.prompt), g.prompt, tokens=8) == g.tokens[:8]
    assert "reading what is missing" in decode.log.read_text()


def test_a_pull_that_breaks_again_says_so(start, model, decode, g):
    faulty = start("sluice-prefill", model, "--failpoints", "source.checksum=error")
    assert refusal(decode, hold(faulty, g.prompt), g.prompt)[0] == "DATA_LOSS"
    faulty = start("sluice-prefill", model, "--failpoints", "source.reset=error")
    assert refusal(decode, hold(faulty, g.prompt), g.prompt)[:2] == ("UNAVAILABLE", "SOURCE_UNREACHABLE")


class Liar(source_pb2_grpc.KvSourceServicer):
    """A source between the decode node and a real source, which changes the answers."""

    def __init__(self, honest, describe=lambda d: None, read=lambda messages: messages):
        self.honest, self.describe, self.read = source_stub(honest), describe, read

    def Describe(self, request, context):
        answer = self.honest.Describe(request)
        self.describe(answer)
        return answer

    def Read(self, request, context):
        yield from self.read(self.honest.Read(request))

    def Release(self, request, context):
        return self.honest.Release(request)


@pytest.fixture
def liars(prefill):
    servers = []

    def begin(**lies):
        server = grpc.server(futures.ThreadPoolExecutor(4))
        source_pb2_grpc.add_KvSourceServicer_to_server(Liar(prefill, **lies), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield begin
    for server in servers:
        server.stop(0).wait()


def silent(messages):
    yield next(messages)
    time.sleep(6 * IDLE_S)


def another_layer(messages):
    for message in messages:
        message.header.layer = 99
        yield message


def short_payload(messages):
    for message in messages:
        message.payload = message.payload[:-2]
        yield message


def too_little(messages):
    yield next(messages)


LIES = {
    "another prompt": ({"describe": lambda d: setattr(d, "prompt_digest", "0" * 64)}, "SOURCE_MISMATCH"),
    "another length": ({"describe": lambda d: setattr(d, "context_length", d.context_length + 1)}, "SOURCE_MISMATCH"),
    "another model": ({"describe": lambda d: setattr(d, "model_fingerprint", "0" * 64)}, "FINGERPRINT_MISMATCH"),
    "another layout": ({"describe": lambda d: setattr(d.cache_kinds[0], "block_tokens", 16)}, "SOURCE_MISMATCH"),
    "no kinds": ({"describe": lambda d: d.ClearField("cache_kinds")}, "SOURCE_MISMATCH"),
    "a layer that is not there": ({"read": another_layer}, "SOURCE_MISMATCH"),
    "short payloads": ({"read": short_payload}, "SOURCE_MISMATCH"),
    "silence": ({"read": silent}, "SOURCE_SILENT"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_source_that_lies_ends_its_own_generate(decode, prefill, liars, g, lie):
    lies, reason = LIES[lie]
    source = hold(prefill, g.prompt)
    source.address = liars(**lies)
    assert refusal(decode, source, g.prompt)[1] == reason
    assert generate(decode, hold(prefill, g.prompt), g.prompt, tokens=4) == g.tokens[:4]


def test_what_could_not_be_read_is_there_for_another_node(decode, prefill, liars, g):
    source = hold(prefill, g.prompt)
    honest = source.address
    source.address = liars(read=too_little)
    assert refusal(decode, source, g.prompt)[0] == "DATA_LOSS"
    source.address = honest
    assert generate(decode, source, g.prompt, tokens=4) == g.tokens[:4]


def test_without_max_tokens_the_room_that_is_left_is_taken(start, model, prefill, g):
    small = start("sluice-server", model, "--hbm-bytes", "1MiB", "--dram-bytes", "4MiB")
    request = decode_pb2.GenerateRequest(source=hold(prefill, g.prompt), prompt_token_ids=g.prompt,
                                         sampling=greedy(ignore_eos=True))
    found, finish = tokens_of(small.decode.Generate(request, timeout=TIMEOUT_S))
    assert len(found) > 100 and finish.reason == decode_pb2.FINISH_REASON_LENGTH
    assert small.stop() == 0


def test_a_node_ends_while_its_source_is_silent(start, model, prefill, liars, g):
    node = start("sluice-server", model, "--drain-timeout-seconds", "0s", "--pull-idle-seconds", "60s")
    source = hold(prefill, g.prompt)
    source.address = liars(read=lambda messages: (time.sleep(6 * IDLE_S) or m for m in messages))
    call = node.decode.Generate(decode_pb2.GenerateRequest(source=source, prompt_token_ids=g.prompt,
                                                           sampling=greedy(max_tokens=4)), timeout=TIMEOUT_S)
    time.sleep(0.2)
    started = time.monotonic()
    assert node.stop() == 0
    assert time.monotonic() - started < 10 * SCALE
    with pytest.raises(grpc.RpcError):
        list(call)


def test_a_source_that_leaves_blocks_out(decode, prefill, liars, g):
    source = hold(prefill, g.prompt)
    source.address = liars(read=too_little)
    assert refusal(decode, source, g.prompt)[0] == "DATA_LOSS"


def test_a_caller_that_hangs_up_ends_its_pull(decode, prefill, liars, g):
    ended = threading.Event()

    def slow(messages):
        try:
            for message in messages:
                yield message
                time.sleep(0.4 * IDLE_S)
        finally:
            ended.set()

    source = hold(prefill, g.prompt)
    source.address = liars(read=slow)
    call = decode.decode.Generate(decode_pb2.GenerateRequest(source=source, prompt_token_ids=g.prompt,
                                                             sampling=greedy(max_tokens=8)), timeout=TIMEOUT_S)
    time.sleep(IDLE_S)
    call.cancel()
    assert ended.wait(TIMEOUT_S)


def test_a_source_that_is_killed_in_the_middle(start, model, decode, g):
    dying = start("sluice-prefill", model)
    source = hold(dying, g.prompt)
    dying.process.send_signal(signal.SIGKILL)
    dying.process.wait()
    assert refusal(decode, source, g.prompt)[:2] == ("UNAVAILABLE", "SOURCE_UNREACHABLE")


def test_a_tenants_prompt_is_read_by_its_own(decode, prefill, g):
    source = prefill.prefill.Run(prefill_pb2.RunRequest(prompt_token_ids=g.prompt, sampling=greedy(max_tokens=1), tenant="a"),
                                 timeout=TIMEOUT_S).source
    assert generate(decode, source, g.prompt, tokens=4, tenant="a") == g.tokens[:4]


def test_a_range_is_read_alone(prefill, g):
    source = hold(prefill, g.prompt)
    request = source_pb2.ReadRequest(source_id=source.source_id)
    request.ranges.add(layer=1, kind="kv", head_begin=0, head_end=1, token_begin=0, token_end=8)
    assert [m.header.layer for m in source_stub(prefill).Read(request)] == [1]
    source_stub(prefill).Release(source_pb2.ReleaseRequest(source_id=source.source_id))


def test_a_prompt_whose_source_fails_is_computed_where_the_node_may(start, model, prefill, liars, g):
    node = start("sluice-server", model, "--local-prefill", "on_failure", "--hbm-bytes", "16MiB", "--dram-bytes", "16MiB",
                 "--chunk-tokens", "48")
    before = node.settled()
    gone = source_pb2.KvSourceRef(address="127.0.0.1:1", source_id="0" * 32)
    assert generate(node, gone, g.prompt, tokens=24) == g.tokens
    liar = hold(prefill, g.prompt)
    liar.address = liars(**LIES["another layout"][0])
    assert generate(node, liar, g.prompt, tokens=24) == g.tokens
    # A prompt that another node holds is read, not computed.
    assert generate(node, hold(prefill, g.prompt), g.prompt, tokens=24) == g.tokens
    # The bytes that were read are counted before the Generate can have ended, a failure perhaps afterwards.
    scrape = wait_for(node, lambda m: m.get("sluice_pull_seconds_count") == 3, TIMEOUT_S)
    assert scrape.get("sluice_local_prefills_total") == 2
    assert scrape.get("sluice_pulls_total", outcome="done") == 1
    for reason in ("SOURCE_UNREACHABLE", "SOURCE_MISMATCH"):
        assert scrape.get("sluice_pulls_total", outcome="failed", reason=reason) == 1
    assert scrape.get("sluice_pull_bytes_total") > 0
    # Without a handoff the node computes nothing.
    error = error_of(lambda: node.decode.Generate(decode_pb2.GenerateRequest(
        prompt_token_ids=g.prompt, sampling=greedy(max_tokens=1)), timeout=TIMEOUT_S))
    assert rpc.reason_of(error) == "NO_HANDOFF"
    node.wait_until_held(before)
    assert node.stop() == 0


def test_a_running_sequence_waits_for_a_chunk_of_such_a_prompt_at_most(start, model):
    """A stream does not wait for a whole prompt: it goes on beside the chunks of 32 tokens."""
    node = start("sluice-server", model, "--local-prefill", "on_failure", "--chunk-tokens", "32", "--hbm-bytes", "16MiB",
                 "--dram-bytes", "16MiB", "--threads", "1")
    gone = source_pb2.KvSourceRef(address="127.0.0.1:1", source_id="0" * 32)
    long = [(i * 37) % 250 + 3 for i in range(4000)]
    stream = node.decode.Generate(decode_pb2.GenerateRequest(
        source=gone, prompt_token_ids=[5, 6, 7], sampling=greedy(max_tokens=4000, ignore_eos=True)), timeout=TIMEOUT_S)
    next(stream)
    spans = []  # times at which the prompt was computed

    def compute():
        began = time.perf_counter()
        generate(node, gone, long, tokens=1)
        spans.append((began, time.perf_counter()))

    other = threading.Thread(target=compute)
    other.start()
    times = []  # of tokens, several of which may come in one message
    for message in stream:
        times.extend([time.perf_counter()] * len(message.tokens))
        if spans:
            stream.cancel()
            break
    other.join()
    began, ended = spans[0]
    # A step is a chunk and a token of the stream. Of 125 chunks only those before the call was heard may lack a token.
    among = sum(began < at < ended for at in times)
    assert among > 100, among


def test_a_node_reads_from_nobody_it_was_not_told_of(start, model, prefill, g):
    node = start("sluice-server", model, "--pull-from", "10.0.0.0/8,*.prefill.svc")
    source = hold(prefill, g.prompt)
    assert refusal(node, source, g.prompt)[:2] == ("PERMISSION_DENIED", "SOURCE_NOT_ALLOWED")
    # No node was called, so the prompt is still held.
    assert source_stub(prefill).Release(source_pb2.ReleaseRequest(source_id=source.source_id), timeout=TIMEOUT_S).found
    assert node.stop() == 0


def test_a_list_of_hosts_that_is_none_is_refused_at_the_start(model):
    done = run(BIN / "sluice-server", "--model", model, "--pull-from", "10.0.0.0/40", "--listen", "127.0.0.1:0")
    assert done.returncode == 1 and "pull_from" in done.stderr and '"10.0.0.0/40"' in done.stderr
