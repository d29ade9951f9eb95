"""Pushed caches over a link between the nodes' devices (kv_transport nccl; shared memory on CPUs), and its failures."""

import functools
import signal
import threading
import time

import grpc
import pytest
from sluice.v1 import admin_pb2, decode_pb2, ingest_pb2, prefill_pb2
from support.link_lab import DEADLINE_S, KV_BYTES, LINK, LINKS, MADE, PROMPT, LinkCounts, starting_apart, wait_until_made
from support.metrics_text import Scrape
from support.nodes import DEVICE, SCALE, TIMEOUT_S, error_of, greedy, tokens_of

Counts = functools.partial(LinkCounts, calls="sluice_push_link_writes_total", moved="sluice_push_bytes_total")


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models("tiny-llama")


@pytest.fixture(scope="module", name="start")
def _start(start):
    return starting_apart(start)


def node(start, model, *more, **where):
    # Small chunks, so that a prompt is many messages, which over NCCL have four of them; and every prompt is pushed whole.
    chunk = "8KiB" if DEVICE == "cuda" else "32KiB"
    return start("sluice-server", model, "--hbm-bytes", "16MiB", "--dram-bytes", "16MiB",
                 "--max-chunk-bytes", chunk, "--no-prefix-cache", *more, **where)


@pytest.fixture(scope="module")
def expected(start, model):
    """Returns the tokens that the prompt decodes to where its caches are pushed over gRPC."""
    return answer(start("sluice-prefill", model), node(start, model))


@pytest.fixture(scope="module")
def decode(start, model):
    return node(start, model, *LINKS)


@pytest.fixture(autouse=True)
def unharmed(decode):
    before = decode.settled()
    yield
    decode.wait_until_held(before)


def push(prefill, decode, prompt=PROMPT):
    return prefill.prefill.Run(prefill_pb2.RunRequest(prompt_token_ids=prompt, sampling=greedy(max_tokens=600),
                                                      decode_address=decode.address), timeout=TIMEOUT_S)


def generate(decode, transfer_id, tokens) -> list[int]:
    request = decode_pb2.GenerateRequest(transfer_id=transfer_id, sampling=greedy(max_tokens=tokens, ignore_eos=True))
    return [token.id for token in tokens_of(decode.decode.Generate(request, timeout=TIMEOUT_S))[0]]


def answer(prefill, decode, prompt=PROMPT, tokens=24) -> list[int]:
    return generate(decode, push(prefill, decode, prompt).transfer_id, tokens)


def test_the_answer_over_a_link_is_that_over_grpc(start, model, decode, expected):
    prefill = start("sluice-prefill", model, *LINKS)
    before = Scrape(decode).get("sluice_ingest_bytes_total")
    made = decode.log.read_text().count(MADE)
    for _ in range(3):
        response = push(prefill, decode)
        assert response.timings.bytes_pushed == KV_BYTES
        assert generate(decode, response.transfer_id, 24) == expected
    counts = Counts(prefill)
    assert (counts.before["done"], counts.before[LINK], counts.before["grpc"]) == (3, 3 * KV_BYTES, 0)
    assert Scrape(decode).get("sluice_ingest_bytes_total") - before == 3 * KV_BYTES
    assert prefill.log.read_text().count(MADE) == 1
    assert decode.log.read_text().count(MADE) == made + 1


@pytest.mark.parametrize("has", ["the decode node", "the prefill node"])
def test_where_one_node_alone_has_links_grpc_carries_all(start, model, decode, expected, has):
    linked = has == "the prefill node"
    prefill = start("sluice-prefill", model, *(LINKS if linked else ()))
    target = node(start, model) if linked else decode
    counts = Counts(prefill)
    for _ in range(2):
        assert answer(prefill, target) == expected
    assert (counts[LINK], counts["grpc"], counts["refused"]) == (0, 2 * KV_BYTES, 2 if linked else 0)
    if linked:
        assert "kv_transport is grpc at the decode node" in prefill.log.read_text()


# The link breaks at its third message, or its first; or its sender stands still for longer than the deadline.
@pytest.mark.parametrize("terms", ["link.send=error*1@3", f"link.send=delay({int(3000 * DEADLINE_S)}ms)*1@3",
                                   "link.send=error*1"])
def test_what_a_broken_link_left_goes_over_grpc(start, model, decode, expected, terms):
    prefill = start("sluice-prefill", model, *LINKS, "--failpoints", terms)
    counts = Counts(prefill)
    assert answer(prefill, decode) == expected
    # A chunk of the broken link may still hold its blocks when gRPC brings them, and they are sent once more.
    assert counts["broken"] == 1 and counts["grpc"] + counts[LINK] >= KV_BYTES and counts["grpc"] > 0
    assert "pushing the rest over gRPC" in prefill.log.read_text()
    # The next one makes a new link.
    again = Counts(prefill)
    assert answer(prefill, decode) == expected
    assert (again["done"], again["grpc"]) == (1, 0)
    assert prefill.log.read_text().count(MADE) == 2


def test_a_chunk_that_lacks_its_checksum_is_sent_again_and_the_link_stays(start, model, expected):
    decode = node(start, model, *LINKS, "--failpoints", "ingest.checksum=error*1@6")
    prefill = start("sluice-prefill", model, *LINKS)
    counts = Counts(prefill)
    assert answer(prefill, decode) == expected
    assert counts["broken"] == 1 and counts["grpc"] > 0 and counts[LINK] > 0
    assert Scrape(decode).get("sluice_ingest_checksum_failures_total") == 1
    assert "CHECKSUM_MISMATCH" in prefill.log.read_text()
    assert answer(prefill, decode) == expected
    assert counts["done"] == 1
    assert prefill.log.read_text().count(MADE) == 1


def test_a_decode_node_that_is_killed_in_the_middle_fails_its_own_push_alone(start, model, decode, expected):
    prefill = start("sluice-prefill", model, *LINKS)
    dying = node(start, model, *LINKS, "--failpoints", "ingest.landing=kill@6")
    counts = Counts(prefill)
    errors = []
    call = threading.Thread(target=lambda: errors.append(error_of(lambda: push(prefill, dying))))
    call.start()
    dying.process.wait()
    # While that push waits for its node to come back, others go on.
    assert answer(prefill, decode) == expected
    assert (counts["done"], counts["grpc"]) == (1, 0)
    call.join()
    assert errors[0].code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), errors
    assert (counts["broken"], counts["grpc"]) == (1, 0)


def test_a_decode_node_that_stands_still_is_given_up_in_time_and_gets_the_rest_over_grpc(start, model, expected):
    prefill = start("sluice-prefill", model, *LINKS, "--failpoints", f"link.send=delay({int(500 * SCALE)}ms)*1@6")
    slow = node(start, model, *LINKS)
    counts = Counts(prefill)
    found = []
    call = threading.Thread(target=lambda: found.append(push(prefill, slow)))
    call.start()
    wait_until_made(prefill)
    slow.process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(2 * DEADLINE_S + 1)
        assert "pushing the rest over gRPC" in prefill.log.read_text()
    finally:
        slow.process.send_signal(signal.SIGCONT)
    call.join()
    assert generate(slow, found[0].transfer_id, 24) == expected
    assert counts["broken"] == 1 and counts[LINK] > 0 and counts["grpc"] > 0
    # It was only asleep: the next push makes a new link.
    assert answer(prefill, slow) == expected
    assert counts["done"] == 1


def test_a_prefill_node_that_is_killed_in_the_middle_leaves_the_decode_node_unharmed(start, model, expected):
    # The lease gives back what the dead node had reserved.
    decode = node(start, model, *LINKS, "--lease-seconds", f"{5 * SCALE}s")
    before = decode.settled()
    dying = start("sluice-prefill", model, *LINKS, "--failpoints", "link.send=kill@6")
    steady = start("sluice-prefill", model, *LINKS)
    transfer = push(steady, decode).transfer_id
    error_of(lambda: push(dying, decode))
    dying.process.wait()
    assert generate(decode, transfer, 24) == expected
    counts = Counts(steady)
    assert answer(steady, decode) == expected
    assert (counts["done"], counts["grpc"]) == (1, 0)
    decode.wait_until_held(before, 20 * SCALE)


def test_a_caller_that_hangs_up_leaves_the_link_in_order(start, model, decode, expected):
    prefill = start("sluice-prefill", model, *LINKS, "--failpoints", f"link.send=delay({int(500 * SCALE)}ms)*1@3")
    counts = Counts(prefill)
    call = prefill.prefill.Run.future(prefill_pb2.RunRequest(
        prompt_token_ids=PROMPT, sampling=greedy(max_tokens=4), decode_address=decode.address), timeout=TIMEOUT_S)
    wait_until_made(prefill)
    call.cancel()
    assert answer(prefill, decode) == expected
    assert counts["broken"] == 0
    assert prefill.log.read_text().count(MADE) == 1


def test_many_prompts_at_once_over_one_link(start, model, decode):
    prompts = [[(i * 31 + n) % 250 + 3 for i in range(150 + 9 * n)] for n in range(8)]
    plain = start("sluice-prefill", model)
    want = [answer(plain, decode, prompt, 8) for prompt in prompts]
    prefill = start("sluice-prefill", model, *LINKS)
    found: dict[int, list[int]] = {}

    def send(n):
        found[n] = answer(prefill, decode, prompts[n], 8)

    threads = [threading.Thread(target=send, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(len(prompts))] == want
    counts = Counts(prefill).before
    assert (counts["done"], counts["broken"], counts["refused"], counts["grpc"]) == (8, 0, 0, 0)


def test_prompts_that_share_a_prefix_push_the_rest_by_link(start, model, expected):
    decode = start("sluice-server", model, "--hbm-bytes", "16MiB", "--dram-bytes", "16MiB", *LINKS)
    prefill = start("sluice-prefill", model, *LINKS)
    assert answer(prefill, decode) == expected
    counts = Counts(prefill)
    assert answer(prefill, decode) == expected
    assert counts["done"] == 1 and 0 < counts[LINK] < KV_BYTES and counts["grpc"] == 0


def test_a_decode_node_that_starts_again_gets_a_new_link(start, model, expected):
    prefill = start("sluice-prefill", model, *LINKS)
    first = node(start, model, *LINKS)
    assert answer(prefill, first) == expected
    listen = first.address
    assert first.stop() == 0
    second = node(start, model, *LINKS, listen=listen)
    assert answer(prefill, second) == expected
    assert Counts(prefill).before["done"] == 2


def test_a_sender_that_asks_wrongly_is_told_so(start, model):
    target = node(start, model, *LINKS)
    reserve = ingest_pb2.ReserveRequest()
    reserve.manifest.model_fingerprint = target.admin.GetModel(
        admin_pb2.GetModelRequest(), timeout=TIMEOUT_S).model.fingerprint
    reserve.manifest.prompt_token_ids.extend(PROMPT)
    reserve.manifest.context_length = len(PROMPT)
    reserve.manifest.max_new_tokens = 4
    transfer = target.ingest.Reserve(reserve, timeout=TIMEOUT_S).transfer_id
    Request = ingest_pb2.WriteByLinkRequest
    chunk = Request(message=ingest_pb2.LinkMessage(chunks=[ingest_pb2.LinkChunk(
        header=ingest_pb2.ChunkHeader(kind="kv", head_end=2, token_end=32), bytes=5)]))

    def opened(**more):
        return Request(open=Request.Open(**({"transfer_id": transfer, "transport": LINK} | more)))

    def say(*messages):
        return list(target.ingest.WriteByLink(iter(messages), timeout=TIMEOUT_S))

    for code, words, *messages in (
            (grpc.StatusCode.INVALID_ARGUMENT, "open"), (grpc.StatusCode.INVALID_ARGUMENT, "open", chunk),
            (grpc.StatusCode.NOT_FOUND, "0000", opened(transfer_id="0" * 32)),
            (grpc.StatusCode.INVALID_ARGUMENT, "open.transfer_id", opened(transfer_id="x" * 129)),
            (grpc.StatusCode.INVALID_ARGUMENT, "open.link_id", opened(link_id="x" * 1025))):
        error = error_of(lambda messages=messages: say(*messages))
        assert error.code() == code and words in error.details(), error
    assert "links of" in say(opened(transport="pigeons"))[0].refused
    assert say(opened(link_id="nonsense"))[0].unknown_link
    # A link that nobody joins ends its stream, and nothing else.
    call = target.ingest.WriteByLink(iter([opened()]), timeout=TIMEOUT_S)
    assert next(call).link_id
    assert error_of(lambda: list(call)).code() == grpc.StatusCode.UNAVAILABLE
    target.ingest.Abort(ingest_pb2.AbortRequest(transfer_id=transfer), timeout=TIMEOUT_S)
