"""Both legs of a request, as the gateway `smg` sends them: a prefill node holds, a decode node pulls."""

import json
import time

import grpc
import pytest
from sluice.v1 import source_pb2, source_pb2_grpc
from sluice_client import rpc
from support.nodes import TIMEOUT_S, error_of, matching_steps
from support.vllm_client import HOLD, answer_of, generate, pb, request, stub

MARGIN = 0.15  # bf16 caches and activations


@pytest.fixture(scope="module")
def decode(start, tiny_models):
    return start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "8MiB", "--dram-bytes", "8MiB")


@pytest.fixture(scope="module")
def prefill(start, tiny_models):
    return start("sluice-prefill", tiny_models("tiny-llama"), "--hbm-bytes", "8MiB")


@pytest.fixture(autouse=True)
def memory_comes_back(decode):
    before = decode.settled()
    yield
    decode.wait_until_held(before)


def first_leg(prefill, prompt, **fields) -> pb.GenerateComplete:
    """Returns the prefill node's answer; `fields` override those of the gateway."""
    return generate(prefill, prompt, {"max_tokens": 1, "ignore_eos": True},
                    **{"kv_transfer_params_json": HOLD, **fields}).complete


def test_both_nodes_are_of_one_pair(decode, prefill):
    ours, theirs = (stub(n).GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S) for n in (decode, prefill))
    assert (ours.kv_connector, ours.block_size) == (theirs.kv_connector, theirs.block_size)
    assert (ours.kv_role, theirs.kv_role) == ("kv_consumer", "kv_producer")
    assert theirs.max_num_seqs > 1
    assert stub(prefill).HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT_S).healthy
    assert len(stub(prefill).GetLoads(pb.GetLoadsRequest(), timeout=TIMEOUT_S).loads) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("case", [0, 1, 2])
def test_the_decode_leg_gives_every_token(decode, prefill, golden, case, stream):
    g = golden("tiny-llama")
    name = f"legs-{case}-{stream}"
    first = first_leg(prefill, g.prompt(case), request_id=name)
    assert first.finish_reason == "length" and first.prompt_tokens == len(g.prompt(case))
    assert json.loads(first.kv_transfer_params_json)["connector"] == "SluiceConnector"
    answer = generate(decode, g.prompt(case), {"max_tokens": 24, "ignore_eos": True}, stream=stream, request_id=name,
                      kv_transfer_params_json=first.kv_transfer_params_json)
    done = answer.complete
    matching_steps(list(done.output_ids), g.tokens(case), g.margins(case), MARGIN)
    assert done.output_ids[0] == first.output_ids[0]
    assert done.completion_tokens == 24 and done.cached_tokens >= len(g.prompt(case)) - 1
    assert answer.streamed == (list(done.output_ids) if stream else [])


def test_a_gateway_that_does_not_know_the_connector_says_nothing(decode, prefill, golden):
    g = golden("tiny-llama")
    first = generate(prefill, g.prompt(1), {"max_tokens": 1, "ignore_eos": True}).complete
    done = generate(decode, g.prompt(1), {"max_tokens": 24, "ignore_eos": True},
                    kv_transfer_params_json=first.kv_transfer_params_json).complete
    matching_steps(list(done.output_ids), g.tokens(1), g.margins(1), MARGIN)


def test_a_handoff_is_used_once(decode, prefill, golden):
    prompt = golden("tiny-llama").prompt(1)
    handoff = first_leg(prefill, prompt).kv_transfer_params_json
    generate(decode, prompt, {"max_tokens": 2}, kv_transfer_params_json=handoff)
    describe = source_pb2.DescribeRequest(source_id=json.loads(handoff)["source_id"])
    deadline = time.monotonic() + TIMEOUT_S
    # The prompt is released a moment after its caches were read, maybe after the answer.
    with pytest.raises(grpc.RpcError) as released:
        while time.monotonic() < deadline:
            source_pb2_grpc.KvSourceStub(prefill.channel).Describe(describe, timeout=TIMEOUT_S)
            time.sleep(0.01)
    assert released.value.code() == grpc.StatusCode.NOT_FOUND
    error = error_of(lambda: generate(decode, prompt, {"max_tokens": 2}, kv_transfer_params_json=handoff))
    assert error.code() == grpc.StatusCode.NOT_FOUND and rpc.reason_of(error) == "SOURCE_NOT_FOUND"


def test_another_prompts_handoff_is_refused(decode, prefill, golden):
    g = golden("tiny-llama")
    handoff = first_leg(prefill, g.prompt(1)).kv_transfer_params_json
    error = error_of(lambda: generate(decode, g.prompt(2), {"max_tokens": 2}, kv_transfer_params_json=handoff))
    assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


@pytest.mark.parametrize("change,field", [
    ({"connector": "NixlConnector"}, "connector"), ({"source_id": "x"}, "source_id"),
    ({"source_id": None}, "source_id"), ({"address": ""}, "address"), ({"remote_block_ids": [1]}, "remote_block_ids"),
    ({"prompt_digest": "00"}, "prompt_digest")])
def test_a_changed_handoff_names_what_is_wrong(decode, prefill, golden, change, field):
    prompt = golden("tiny-llama").prompt(1)
    handoff = {**json.loads(first_leg(prefill, prompt).kv_transfer_params_json), **change}
    handoff = {key: value for key, value in handoff.items() if value is not None}
    error = error_of(lambda: generate(decode, prompt, {"max_tokens": 2},
                                      kv_transfer_params_json=json.dumps(handoff)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and field in error.details()
    named = rpc.details_of(error)["BadRequest"].field_violations[0].field
    assert named.startswith("kv_transfer_params_json")


@pytest.mark.parametrize("sampling,fields,field", [
    ({"max_tokens": 2}, {}, "sampling_params.max_tokens"),
    ({}, {}, "sampling_params.max_tokens"),
    ({"max_tokens": 1}, {"kv_transfer_params_json": '{"do_remote_decode":false}'}, "kv_transfer_params_json"),
    ({"max_tokens": 1}, {"kv_transfer_params_json": '{"do_remote_prefill":true}'}, "kv_transfer_params_json"),
    ({"max_tokens": 1, "n": 2}, {}, "sampling_params.n"),
    ({"max_tokens": 1, "top_p": 2}, {}, "sampling_params.top_p"),
    ({"max_tokens": 1, "json_schema": "{}"}, {}, "sampling_params.json_schema")])
def test_a_bad_prefill_leg_names_its_fault(prefill, sampling, fields, field):
    fields = {"kv_transfer_params_json": HOLD, **fields}
    error = error_of(lambda: generate(prefill, [5, 6], sampling, **fields))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert rpc.details_of(error)["BadRequest"].field_violations[0].field == field
    first_leg(prefill, [5, 6])  # the next request works


def test_an_abort_between_the_legs_gives_back_what_is_held(prefill, golden):
    prompt = golden("tiny-llama").prompt(1)
    wanted, other = (json.loads(first_leg(prefill, prompt, request_id=name).kv_transfer_params_json)["source_id"]
                     for name in ("between-the-legs", "another"))
    stub(prefill).Abort(pb.AbortRequest(request_ids=["between-the-legs", "never-was"]), timeout=TIMEOUT_S)
    source = source_pb2_grpc.KvSourceStub(prefill.channel)
    error = error_of(lambda: source.Describe(source_pb2.DescribeRequest(source_id=wanted), timeout=TIMEOUT_S))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    source.Describe(source_pb2.DescribeRequest(source_id=other), timeout=TIMEOUT_S)
    source.Release(source_pb2.ReleaseRequest(source_id=other), timeout=TIMEOUT_S)


def test_an_abort_ends_a_prefill_leg(prefill):
    stream = stub(prefill).Generate(request(
        [(7 * i) % 500 for i in range(4000)], {"max_tokens": 1, "ignore_eos": True}, request_id="to-abort",
        kv_transfer_params_json=HOLD), timeout=TIMEOUT_S)
    while not stub(prefill).GetLoads(pb.GetLoadsRequest(), timeout=TIMEOUT_S).loads[0].num_total_reqs:
        assert stream.is_active(), "the prompt was computed before it could be aborted"
    stub(prefill).Abort(pb.AbortRequest(request_ids=["to-abort"]), timeout=TIMEOUT_S)
    assert answer_of(stream).complete.finish_reason == "abort"
