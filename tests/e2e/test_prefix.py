"""Prompts that begin as earlier ones did: what is sent, read and computed of them, and by whom it is found."""

import grpc
import numpy as np
import pytest
from sluice.v1 import decode_pb2, ingest_pb2, prefill_pb2
from sluice_client import rpc
from sluice_client.pusher import Pusher, PushError
from support.metrics_text import Scrape, wait_for
from support.nodes import TIMEOUT_S, greedy, tokens_of

BLOCK = 32
TURN = 200
ANSWER = 24
SAMPLING = greedy(max_tokens=ANSWER, ignore_eos=True)


def ids(count: int, seed: int) -> list[int]:
    return [(i * i * 7 + i * 3 + seed * 31) % 250 + 3 for i in range(count)]


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models("tiny-llama")


@pytest.fixture(scope="module")
def decode(start, model):
    return start("sluice-server", model, "--hbm-bytes", "64MiB", "--dram-bytes", "64MiB", "--local-prefill", "always",
                 "--kv-dtype", "float32", "--max-chunk-bytes", "1MiB")


@pytest.fixture(scope="module")
def prefill(start, model):
    return start("sluice-prefill", model, "--hbm-bytes", "64MiB", "--kv-dtype", "float32")


@pytest.fixture(scope="module")
def without(start, model):
    """A node that shares nothing, which says what every prompt decodes to."""
    return start("sluice-server", model, "--hbm-bytes", "64MiB", "--dram-bytes", "64MiB", "--local-prefill", "always",
                 "--kv-dtype", "float32", "--prefix-cache=false")


def generated(node, **request):
    tokens, finish = tokens_of(node.decode.Generate(
        decode_pb2.GenerateRequest(sampling=SAMPLING, **request), timeout=TIMEOUT_S))
    return [token.id for token in tokens], finish


def shared(node, tokens: int) -> None:
    """Waits until the node has blocks of so many tokens for later prompts: a sequence leaves them after its end."""
    found = wait_for(node, lambda scrape: scrape.get("sluice_prefix_cache_tokens") >= tokens, TIMEOUT_S)
    assert found.get("sluice_prefix_cache_tokens") >= tokens


def push(prefill, decode, prompt, tenant=""):
    return prefill.prefill.Run(prefill_pb2.RunRequest(
        prompt_token_ids=prompt, sampling=SAMPLING, decode_address=decode.address, tenant=tenant), timeout=TIMEOUT_S)


def test_a_second_turn_pushes_a_twentieth_of_its_bytes(decode, prefill, without):
    first = ids(3700, 1)
    have = Scrape(decode).get("sluice_prefix_cache_tokens")
    run = push(prefill, decode, first)
    answer, finish = generated(decode, transfer_id=run.transfer_id)
    assert finish.usage.reused_tokens == 0 and answer == generated(without, prompt_token_ids=first)[0]
    shared(decode, have + (3700 + ANSWER - 1) // BLOCK * BLOCK)
    second = first + answer + ids(TURN, 2)
    again = push(prefill, decode, second)
    share = again.timings.bytes_pushed / run.timings.bytes_pushed * len(first) / len(second)
    assert 0 < share <= 0.06, share
    tokens, finish = generated(decode, transfer_id=again.transfer_id)
    assert tokens == generated(without, prompt_token_ids=second)[0]
    assert finish.usage.reused_tokens == (len(first) + ANSWER - 1) // BLOCK * BLOCK
    assert finish.usage.cached_tokens == len(second)


def test_a_second_turn_is_read_by_a_twentieth(decode, prefill, without):
    prompt = ids(3700, 3)

    def pulled(prompt):
        source = prefill.prefill.Run(prefill_pb2.RunRequest(prompt_token_ids=prompt, sampling=greedy(max_tokens=1)),
                                     timeout=TIMEOUT_S).source
        before = Scrape(decode).get("sluice_pull_bytes_total")
        tokens, finish = generated(decode, source=source, prompt_token_ids=prompt)
        assert tokens == generated(without, prompt_token_ids=prompt)[0]
        return tokens, finish, Scrape(decode).get("sluice_pull_bytes_total") - before

    have = Scrape(decode).get("sluice_prefix_cache_tokens")
    answer, finish, whole = pulled(prompt)
    assert finish.usage.reused_tokens == 0
    shared(decode, have + (3700 + ANSWER - 1) // BLOCK * BLOCK)
    second = prompt + answer + ids(TURN, 4)
    _, finish, rest = pulled(second)
    assert finish.usage.reused_tokens == (len(prompt) + ANSWER - 1) // BLOCK * BLOCK
    assert 0 < rest / whole * len(prompt) / len(second) <= 0.06
    # The prompt alone again: its last row is all that is read.
    _, finish, rest = pulled(prompt)
    assert finish.usage.reused_tokens == (len(prompt) - 1) // BLOCK * BLOCK and rest < whole / 50


def test_a_prompt_that_is_computed_here_begins_with_what_is_known(decode, without):
    system = ids(640, 5)
    before = Scrape(decode)
    answers = []
    for caller in range(4):
        prompt = system + ids(70, 10 + caller)
        tokens, finish = generated(decode, prompt_token_ids=prompt)
        assert tokens == generated(without, prompt_token_ids=prompt)[0]
        assert finish.usage.reused_tokens == finish.usage.cached_tokens == (640 if caller else 0)
        answers.append(tokens)
        shared(decode, before.get("sluice_prefix_cache_tokens") + 640 + BLOCK * (caller + 1))
    after = Scrape(decode)

    def moved(name, **labels):
        return after.get(name, **labels) - before.get(name, **labels)

    assert moved("vllm:prefix_cache_queries_total") == 4 * 710
    assert moved("vllm:prefix_cache_hits_total") == 3 * 640 == moved("sluice_tokens_total", kind="reused")
    assert moved("sluice_tokens_total", kind="prompt") == 709 + 3 * 69  # the last row of each gives its first token
    assert after.get("vllm:cache_config_info", enable_prefix_caching="True") == 1


def test_nobody_finds_what_another_tenant_has(decode):
    prompt = ids(300, 6)
    for tenant, reused in (("alice", 0), ("bob", 0), ("alice", 288), ("", 0)):
        _, finish = generated(decode, prompt_token_ids=prompt, tenant=tenant)
        assert finish.usage.reused_tokens == reused
        decode.settled()
        with Pusher(decode.address) as pusher:
            pusher.reserve(prompt, tenant="carol")
            assert pusher.cached_tokens == 0
            pusher.abort()


class Caches:
    """A prompt's caches as a prefill node in Python has them."""

    def __init__(self, decode, tokens: int):
        with Pusher(decode.address) as pusher:
            self.kind, self.layers = pusher.model.cache_kinds[0], pusher.model.layers
        dim = self.kind.part_bytes[0] // 4
        random = np.random.default_rng(7)
        self.arrays = [[random.standard_normal((tokens, self.kind.heads, dim), np.float32) * 0.1 for _ in range(2)]
                       for _ in range(self.layers)]

    def push(self, decode, prompt, whole=False, skip=0):
        """Pushes the prompt. `whole`: as a sender that knows nothing of cached tokens. `skip`: leaves out so many."""
        with Pusher(decode.address) as pusher:
            pusher.reserve(prompt, max_new_tokens=ANSWER)
            known = pusher.cached_tokens
            if whole:
                pusher.cached_tokens = 0
            elif skip:
                pusher.cached_tokens = skip
            for layer, (k, v) in enumerate(self.arrays):
                pusher.write_layer(layer, k[:len(prompt)], v[:len(prompt)])
            return pusher.commit(), known


def test_senders_may_leave_out_what_is_there_and_need_not(decode):
    prompt = ids(500, 8)
    caches = Caches(decode, len(prompt))
    transfer, known = caches.push(decode, prompt)
    assert known == 0
    want, _ = generated(decode, transfer_id=transfer)
    for whole in (False, True):
        decode.settled()
        before = Scrape(decode).get("sluice_ingest_bytes_total")
        transfer, known = caches.push(decode, prompt, whole)
        assert known == 480
        sent = Scrape(decode).get("sluice_ingest_bytes_total") - before
        per_token = caches.kind.bytes_per_token * caches.kind.heads * caches.layers
        assert sent == per_token * (500 if whole else 20)
        tokens, finish = generated(decode, transfer_id=transfer)
        assert tokens == want and finish.usage.reused_tokens == 480


def test_a_sender_that_believes_more_to_be_there_is_told_what_is_missing(decode):
    prompt = ids(200, 9)
    caches = Caches(decode, len(prompt))
    with pytest.raises(PushError) as refused:
        caches.push(decode, prompt, skip=96)
    cause = refused.value.rpc_error
    assert cause.code() is grpc.StatusCode.FAILED_PRECONDITION and rpc.reason_of(cause) == "MISSING_BLOCKS"
    ranges = rpc.details_of(cause)["MissingBlocks"].ranges
    assert {(r.token_begin, r.token_end) for r in ranges} == {(0, 96)}
    # Nothing is lost: the same sender may send them.
    with Pusher(decode.address) as pusher:
        pusher.reserve(prompt, max_new_tokens=ANSWER)
        for begin in (96, 0):
            for layer, (k, v) in enumerate(caches.arrays):
                end = len(prompt) if begin else 96
                pusher.write_layer(layer, k[begin:end], v[begin:end], token_begin=begin)
        assert len(generated(decode, transfer_id=pusher.commit())[0]) == ANSWER


def test_other_bytes_for_known_blocks_change_nothing(decode):
    prompt = ids(130, 11)
    caches = Caches(decode, len(prompt))
    transfer, _ = caches.push(decode, prompt)
    want, _ = generated(decode, transfer_id=transfer)
    decode.settled()
    spoiled = Caches(decode, len(prompt))
    for k, v in spoiled.arrays:
        k[:128] += 1
        v[:128] -= 1
    transfer, known = spoiled.push(decode, prompt, whole=True)
    assert known == 128
    assert generated(decode, transfer_id=transfer)[0] == want
    state = decode.ingest.GetTransfer(ingest_pb2.GetTransferRequest(transfer_id=transfer), timeout=TIMEOUT_S)
    assert state.state == ingest_pb2.GetTransferResponse.STATE_COMMITTED
