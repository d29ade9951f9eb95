"""Held caches over a link between the nodes' devices (kv_transport nccl; shared memory on CPUs), and its failures."""

import functools
import signal
import threading
import time
from pathlib import Path

import grpc
import pytest
from sluice.v1 import decode_pb2, prefill_pb2, source_pb2, source_pb2_grpc
from sluice_client import rpc
from support.link_lab import DEADLINE_S, KV_BYTES, LINK, LINKS, MADE, PROMPT, LinkCounts, starting_apart, wait_until_made
from support.metrics_text import wait_for
from support.nodes import BIN, DEVICE, SCALE, TIMEOUT_S, error_of, greedy, run, tokens_of

IDLE_S = 1.0 * SCALE
Counts = functools.partial(LinkCounts, calls="sluice_pull_link_reads_total", moved="sluice_pull_bytes_total")
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
ID = f"shm:{BOOT}:sluice-link-{'0' * 32}"


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models("tiny-llama")


@pytest.fixture(scope="module", name="start")
def _start(start):
    return starting_apart(start)


@pytest.fixture(scope="module")
def expected(start, model):
    """Returns the tokens that the prompt decodes to where its caches come over gRPC."""
    decode, prefill = start("sluice-server", model, "--hbm-bytes", "16MiB"), start("sluice-prefill", model)
    return generate(decode, hold(prefill), tokens=24)


def node(start, model, *more):
    # Small messages, so that a prompt is many of them; and every prompt is read whole. Over NCCL a message is four
    # chunks.
    chunk = "8KiB" if DEVICE == "cuda" else "32KiB"
    return start("sluice-server", model, "--hbm-bytes", "16MiB", "--dram-bytes", "16MiB", "--pull-idle-seconds",
                 f"{IDLE_S}s", "--max-chunk-bytes", chunk, "--no-prefix-cache", *LINKS, *more)


@pytest.fixture(scope="module")
def decode(start, model):
    return node(start, model)


@pytest.fixture(autouse=True)
def unharmed(decode):
    before = decode.settled()
    yield
    decode.wait_until_held(before)


def hold(prefill, prompt=PROMPT):
    return prefill.prefill.Run(prefill_pb2.RunRequest(prompt_token_ids=prompt, sampling=greedy(max_tokens=1)),
                               timeout=TIMEOUT_S).source


def generate(decode, source, tokens=8, prompt=PROMPT) -> list[int]:
    request = decode_pb2.GenerateRequest(source=source, prompt_token_ids=prompt,
                                         sampling=greedy(max_tokens=tokens, ignore_eos=True))
    found, _ = tokens_of(decode.decode.Generate(request, timeout=TIMEOUT_S))
    return [token.id for token in found]


def test_the_answer_over_a_link_is_that_over_grpc(start, model, decode, expected):
    prefill = start("sluice-prefill", model, *LINKS)
    counts = Counts(decode)
    for _ in range(3):
        assert generate(decode, hold(prefill), tokens=24) == expected
    assert (counts["done"], counts[LINK], counts["grpc"]) == (3, 3 * KV_BYTES, 0)
    assert decode.log.read_text().count(MADE) == 1
    assert MADE in prefill.log.read_text()


@pytest.mark.parametrize("has", ["the decode node", "the prefill node"])
def test_where_one_node_alone_has_links_grpc_carries_all(start, model, decode, expected, has):
    plain = has == "the prefill node"
    reader = start("sluice-server", model, "--hbm-bytes", "16MiB") if plain else decode
    prefill = start("sluice-prefill", model, *(LINKS if plain else ()))
    counts = Counts(reader)
    assert generate(reader, hold(prefill), tokens=24) == expected
    assert generate(reader, hold(prefill), tokens=24)[:4] == expected[:4]
    assert counts[LINK] == 0 and counts["grpc"] > 0
    assert counts["refused"] == (0 if plain else 2)
    if not plain:
        assert "kv_transport is grpc at the source" in reader.log.read_text()


# The link breaks at its third message; or its sender stands still for longer than the deadline.
@pytest.mark.parametrize("terms", ["link.send=error*1@3", f"link.send=delay({int(3000 * DEADLINE_S)}ms)*1@3",
                                   "link.send=error*1", "source.checksum=error*1@2"])
def test_what_a_broken_link_left_comes_over_grpc(start, model, decode, expected, terms):
    prefill = start("sluice-prefill", model, *LINKS, "--failpoints", terms)
    counts = Counts(decode)
    assert generate(decode, hold(prefill), tokens=24) == expected
    assert counts["broken"] == 1 and counts["grpc"] > 0
    assert counts["grpc"] + counts[LINK] == KV_BYTES
    assert "reading what is missing over gRPC" in decode.log.read_text()
    # The next one makes a new link.
    again = Counts(decode)
    assert generate(decode, hold(prefill), tokens=24) == expected
    assert (again["done"], again["grpc"]) == (1, 0)


def beside(decode, prefill, expected, harm):
    """Calls harm() while a stream of another source decodes, and checks that the stream goes on to its end."""
    request = decode_pb2.GenerateRequest(source=hold(prefill), prompt_token_ids=PROMPT,
                                         sampling=greedy(max_tokens=600, ignore_eos=True))
    ids: list[int] = []

    def read():
        ids.extend(token.id for token in tokens_of(decode.decode.Generate(request, timeout=TIMEOUT_S))[0])

    stream = threading.Thread(target=read)
    stream.start()
    harm()
    stream.join()
    assert len(ids) == 600 and ids[:24] == expected


def test_a_source_that_is_killed_in_the_middle_ends_its_own_prompt(start, model, decode, expected):
    steady = start("sluice-prefill", model, *LINKS)
    dying = start("sluice-prefill", model, *LINKS, "--failpoints", "link.send=kill@3")
    source = hold(dying)

    def harm():
        began = time.monotonic()
        error = error_of(lambda: generate(decode, source))
        assert (error.code(), rpc.reason_of(error)) == (grpc.StatusCode.UNAVAILABLE, "SOURCE_UNREACHABLE")
        assert time.monotonic() - began < DEADLINE_S + 20 * SCALE

    beside(decode, steady, expected, harm)
    dying.process.wait()
    assert generate(decode, hold(steady), tokens=24) == expected


def test_a_source_that_is_stopped_is_given_up_in_time(start, model, decode, expected):
    steady = start("sluice-prefill", model, *LINKS)
    slow = start("sluice-prefill", model, *LINKS, "--failpoints", f"link.send=delay({int(500 * SCALE)}ms)*1@3")
    source = hold(slow)
    counts = Counts(decode)

    def harm():
        caught = []
        call = threading.Thread(target=lambda: caught.append(error_of(lambda: generate(decode, source))))
        call.start()
        wait_until_made(slow)
        slow.process.send_signal(signal.SIGSTOP)
        call.join()
        assert rpc.reason_of(caught[0]) in ("SOURCE_SILENT", "SOURCE_UNREACHABLE"), caught[0]

    try:
        beside(decode, steady, expected, harm)
    finally:
        slow.process.send_signal(signal.SIGCONT)
    assert counts["broken"] == 1
    # It was only asleep: what it still holds is read, over a new link.
    assert generate(decode, hold(slow), tokens=24) == expected
    assert counts["done"] >= 2


def test_a_caller_that_hangs_up_leaves_the_link_in_order(start, model, decode, expected):
    prefill = start("sluice-prefill", model, *LINKS, "--failpoints", f"link.send=delay({int(500 * SCALE)}ms)*1@3")
    counts = Counts(decode)
    call = decode.decode.Generate(decode_pb2.GenerateRequest(
        source=hold(prefill), prompt_token_ids=PROMPT, sampling=greedy(max_tokens=4)), timeout=TIMEOUT_S)
    wait_until_made(prefill)
    call.cancel()
    made = decode.log.read_text().count(MADE)
    assert generate(decode, hold(prefill), tokens=24) == expected
    assert counts["broken"] == 0
    assert decode.log.read_text().count(MADE) == made


def test_many_prompts_at_once_over_one_link(start, model, decode):
    prefill = start("sluice-prefill", model, *LINKS)
    prompts = [[(i * 31 + n) % 250 + 3 for i in range(150 + 9 * n)] for n in range(8)]
    plain = start("sluice-prefill", model)
    want = [generate(decode, hold(plain, prompt), prompt=prompt) for prompt in prompts]
    counts = Counts(decode)
    found: dict[int, list[int]] = {}

    def read(n):
        found[n] = generate(decode, hold(prefill, prompts[n]), prompt=prompts[n])

    threads = [threading.Thread(target=read, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(len(prompts))] == want
    assert (counts["done"], counts["broken"], counts["grpc"]) == (8, 0, 0)


def test_prompts_that_share_a_prefix_read_the_rest_by_link(start, model, expected):
    reader = start("sluice-server", model, "--hbm-bytes", "16MiB", "--dram-bytes", "16MiB", *LINKS)
    prefill = start("sluice-prefill", model, *LINKS)
    assert generate(reader, hold(prefill), tokens=24) == expected
    counts = Counts(reader)
    assert generate(reader, hold(prefill), tokens=24) == expected
    scrape = wait_for(reader, lambda m: m.get("sluice_pulls_total", outcome="done") == 2, TIMEOUT_S)
    assert scrape is not None
    assert counts["done"] == 1 and 0 < counts[LINK] < KV_BYTES and counts["grpc"] == 0


def test_a_source_that_starts_again_gets_a_new_link(start, model, decode, expected):
    first = start("sluice-prefill", model, *LINKS)
    assert generate(decode, hold(first), tokens=24) == expected
    listen = first.address
    assert first.stop() == 0
    second = start("sluice-prefill", model, *LINKS, listen=listen)
    assert generate(decode, hold(second), tokens=24) == expected


@pytest.mark.skipif(DEVICE == "cuda", reason="only NCCL makes its ids")
def test_a_reader_that_asks_wrongly_is_told_so(start, model):
    prefill = start("sluice-prefill", model, *LINKS)
    source = hold(prefill)
    stub = source_pb2_grpc.KvSourceStub(prefill.channel)
    good = dict(read=source_pb2.ReadRequest(source_id=source.source_id), link_id=ID, message_bytes=1 << 20, depth=4)

    def ask(**more):
        return stub.ReadByLink(source_pb2.ReadByLinkRequest(**(good | more)), timeout=TIMEOUT_S)

    for field, more in (("message_bytes", {"message_bytes": 0}), ("message_bytes", {"message_bytes": 1 << 60}),
                        ("depth", {"depth": 0}), ("depth", {"depth": 1 << 31}),
                        ("message_bytes", {"message_bytes": 1 << 27}), ("max_chunk_bytes", {"message_bytes": 1})):
        error = error_of(lambda more=more: ask(**more))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and field in error.details(), (field, error)
    wrong = source_pb2.ReadRequest(source_id=source.source_id)
    wrong.ranges.add(layer=99, kind="kv", head_end=1, token_end=8)
    assert error_of(lambda: ask(read=wrong)).code() == grpc.StatusCode.INVALID_ARGUMENT
    # Ids that no device here has made are refused, and nothing is opened for them.
    for link_id in ("", "nonsense", "shm:", f"shm:{BOOT}:../../etc/passwd", "nccl:" + "0" * 256):
        answer = ask(link_id=link_id)
        assert answer.refused or (DEVICE == "cuda" and answer.unknown_link), link_id
        assert not answer.chunks
    if DEVICE == "cpu":
        assert ask().unknown_link
        assert len(ask(new_link=True).chunks) > 0
    # The node serves on, though nobody joins that link.
    assert stub.Describe(source_pb2.DescribeRequest(source_id=source.source_id), timeout=TIMEOUT_S).bytes == KV_BYTES


def test_a_transport_that_there_is_not_is_refused_at_the_start(model):
    done = run(BIN / "sluice-server", "--model", model, "--listen", "127.0.0.1:0", "--kv-transport", "rdma")
    assert done.returncode == 1 and "kv_transport" in done.stderr and "nccl" in done.stderr
