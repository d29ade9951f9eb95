"""Bad requests to Generate and Run: INVALID_ARGUMENT names the field, and nothing else changes."""

import math

import grpc
import pytest
from nodes import TIMEOUT_S, error_of, greedy, refused_field, tokens_of
from sluice.v1 import common_pb2, decode_pb2, prefill_pb2
from sluice_client import rpc
from transfers import committed

NAN, INF = math.nan, math.inf

BAD_SAMPLING = [
    *[("temperature", {"temperature": v}) for v in (NAN, INF, -0.1)],
    *[("top_p", {"top_p": v}) for v in (NAN, 0, -0.5, 1.01, INF)],
    *[("min_p", {"min_p": v}) for v in (NAN, -0.1, 1.1)],
    *[("repetition_penalty", {"repetition_penalty": v}) for v in (NAN, 0, -1, INF)],
    *[("frequency_penalty", {"frequency_penalty": v}) for v in (NAN, -2.1, 2.1)],
    *[("presence_penalty", {"presence_penalty": v}) for v in (NAN, -2.1, 2.1)],
    *[("logit_bias", {"logit_bias": v}) for v in (
        {3: NAN}, {3: 100.5}, {3: -100.5}, {512: 1}, {i: 1.0 for i in range(1025)})],
    ("min_tokens", {"min_tokens": 9}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": 25}),  # More than the manifest reserved.
    *[("stop_token_ids", {"stop_token_ids": v}) for v in ([512], [2**32 - 1], list(range(33)))],
    *[("stop", {"stop": v}) for v in (["x"], [""], ["x" * 257], ["a"] * 17)],  # No tokenizer here.
    ("logprobs", {"logprobs": 21}),
    ("n", {"n": 2}),
    ("n", {"n": 0}),
]


def sampling(settings):
    return common_pb2.SamplingParams(**{"temperature": 0, "max_tokens": 8, **settings})


@pytest.fixture(scope="module")
def ready(small, golden):
    """A committed transfer that bad requests must leave alone; a good one uses it up at the end."""
    before = small.held()
    transfer = committed(small, golden("tiny-llama"))
    yield transfer
    tokens, _ = tokens_of(small.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=transfer, sampling=greedy(max_tokens=24)), timeout=TIMEOUT_S))
    assert len(tokens) == 24
    small.wait_until_held(before)


@pytest.fixture
def unharmed(small, golden):
    """After a bad request: capacity is as it was, and the next request works."""
    before = small.held()
    yield
    small.wait_until_held(before)
    tokens, _ = tokens_of(small.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=committed(small, golden("tiny-llama"), case=0, max_new_tokens=2),
        sampling=greedy(max_tokens=2, ignore_eos=True)), timeout=TIMEOUT_S))
    assert len(tokens) == 2
    small.wait_until_held(before)


def refuse(small, **request):
    return error_of(lambda: small.decode.Generate(decode_pb2.GenerateRequest(**request), timeout=TIMEOUT_S))


@pytest.mark.parametrize("field, settings", BAD_SAMPLING, ids=lambda v: str(v)[:40])
def test_a_bad_sampling_value_is_refused_by_name(small, ready, unharmed, field, settings):
    error = refuse(small, transfer_id=ready, sampling=sampling(settings))
    assert refused_field(error).split("[")[0] == f"sampling.{field}"


@pytest.mark.parametrize("field, settings", [
    b for b in BAD_SAMPLING if "stop" not in b[1] and b[1].get("max_tokens") != 25], ids=lambda v: str(v)[:40])
def test_the_prefill_node_refuses_it_too(pairs, field, settings):
    pair = pairs("tiny-llama")
    before = pair.decode.held()
    error = error_of(lambda: pair.prefill.prefill.Run(prefill_pb2.RunRequest(
        prompt_token_ids=[5, 6], sampling=sampling(settings), decode_address=pair.decode.address),
        timeout=TIMEOUT_S))
    assert refused_field(error).split("[")[0] == f"sampling.{field}"
    pair.decode.wait_until_held(before)


def test_a_prompt_that_differs_from_the_manifests_is_refused(small, ready, unharmed):
    error = refuse(small, transfer_id=ready, prompt_token_ids=[1, 2, 3], sampling=sampling({}))
    assert refused_field(error).startswith("prompt_token_ids")


def test_a_prompt_that_nobody_prefilled_is_refused(small, unharmed):
    error = refuse(small, prompt_token_ids=[1, 2, 3], sampling=sampling({}))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert rpc.reason_of(error) and "local_prefill" in error.details().replace("-", "_")


@pytest.mark.parametrize("prompt", [[], [512], [5, 2**32 - 1], [5] * 4097], ids=["empty", "id", "id32", "long"])
def test_a_bad_prompt_is_refused_everywhere(small, pairs, unharmed, prompt):
    error = refuse(small, prompt_token_ids=prompt, sampling=sampling({}))
    assert refused_field(error).startswith("prompt_token_ids")
    pair = pairs("tiny-llama")
    error = error_of(lambda: pair.prefill.prefill.Run(prefill_pb2.RunRequest(
        prompt_token_ids=prompt, sampling=sampling({}), decode_address=pair.decode.address),
        timeout=TIMEOUT_S))
    assert refused_field(error).startswith("prompt_token_ids")


@pytest.mark.parametrize("transfer_id", ["0" * 32, "nonsense", "g" * 32])
def test_an_unknown_transfer_is_not_found(small, unharmed, transfer_id):
    error = refuse(small, transfer_id=transfer_id, sampling=sampling({}))
    assert error.code() == grpc.StatusCode.NOT_FOUND and transfer_id in error.details()


def test_a_transfer_feeds_one_generate(small, unharmed, golden):
    transfer = committed(small, golden("tiny-llama"))
    stream = small.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=transfer, sampling=greedy(max_tokens=24, ignore_eos=True)), timeout=TIMEOUT_S)
    next(stream)
    error = refuse(small, transfer_id=transfer, sampling=sampling({}))
    assert error.code() in (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.NOT_FOUND)
    list(stream)
    assert refuse(small, transfer_id=transfer, sampling=sampling({})).code() in (
        grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.NOT_FOUND)


@pytest.mark.parametrize("field", ["request_id", "rendezvous_key", "tenant"])
def test_a_name_that_is_too_long_is_refused(small, unharmed, field):
    request = {"rendezvous_key": "k", "sampling": sampling({}), field: "x" * 129}
    assert refused_field(refuse(small, **request)) == field


def test_an_address_that_is_none_is_refused(pairs):
    for address in ("", "nonsense", "127.0.0.1:99999"):
        error = error_of(lambda a=address: pairs("tiny-llama").prefill.prefill.Run(prefill_pb2.RunRequest(
            prompt_token_ids=[5], sampling=sampling({}), decode_address=a), timeout=TIMEOUT_S))
        assert refused_field(error) == "decode_address"


def test_an_unknown_method_is_unimplemented(small):
    call = small.channel.unary_unary("/sluice.v1.Decode/Nonsense")
    assert error_of(lambda: call(b"", timeout=TIMEOUT_S)).code() == grpc.StatusCode.UNIMPLEMENTED


def test_bytes_that_are_no_message_harm_nobody(small, unharmed):
    for method in ("Decode/Cancel", "KvIngest/Reserve", "KvIngest/Commit", "Admin/ListSequences"):
        call = small.channel.unary_unary(f"/sluice.v1.{method}")
        error_of(lambda c=call: c(b"\xff\xff\xff\xff\x07garbage", timeout=TIMEOUT_S))
