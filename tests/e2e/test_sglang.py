"""Both legs of a request come at once, as the gateway `smg` sends them to SGLang, and meet in a room."""

import contextlib
import hashlib
import itertools
import time

import grpc
import pytest
from sluice.v1 import source_pb2, source_pb2_grpc
from sluice_client import rpc
from smg_grpc_proto.generated import common_pb2 as smg
from support.nodes import SCALE, TIMEOUT_S, error_of, matching_steps
from support.sglang_client import answer_of, generate, pb, request, room, stub
from support.sglang_client import start as start_leg

Code = grpc.StatusCode
MARGIN = 0.15  # bf16 caches and activations
NUMBERS = itertools.count(1)
SGLANG = ("--gateway", "sglang", "--hbm-bytes", "8MiB")


@pytest.fixture(scope="module")
def decode(start, tiny_models):
    return start("sluice-server", tiny_models("tiny-llama"), *SGLANG, "--dram-bytes", "8MiB")


@pytest.fixture(scope="module")
def prefill(start, tiny_models):
    return start("sluice-prefill", tiny_models("tiny-llama"), *SGLANG)


@pytest.fixture(autouse=True)
def memory_comes_back(decode, prefill):
    """Checks that both nodes hold nothing a moment after a test."""
    before = decode.settled()
    yield
    decode.wait_until_held(before)
    deadline = time.monotonic() + 5 * SCALE
    while held(prefill) > 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert held(prefill) == 0


def held(prefill) -> float:
    """Returns the share of the prefill node's memory that waiting caches take."""
    return stub(prefill).GetLoads(pb.GetLoadsRequest(), timeout=TIMEOUT_S).loads[0].token_usage


def requests_at(node) -> int:
    return stub(node).GetLoads(pb.GetLoadsRequest(), timeout=TIMEOUT_S).loads[0].num_total_reqs


def reason(error: grpc.RpcError) -> tuple:
    return error.code(), rpc.reason_of(error)


def generate_error(node, prompt, where, **sampling) -> grpc.RpcError:
    return error_of(lambda: generate(node, prompt, {"max_new_tokens": 2, **sampling}, disaggregated_params=where))


def digest(prompt) -> str:
    return hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in prompt)).hexdigest()


def test_the_nodes_say_what_the_gateway_asks(decode, prefill):
    for node, mode in ((decode, "decode"), (prefill, "prefill")):
        assert stub(node).HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT_S).healthy
        info = stub(node).GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT_S)
        assert info.is_generation and info.vocab_size == 512 and list(info.architectures) == ["LlamaForCausalLM"]
        server = stub(node).GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
        assert server.server_args["disaggregation_mode"] == mode and server.server_args["max_running_requests"] > 1
        load = stub(node).GetLoads(pb.GetLoadsRequest(include=["core", "disagg"]), timeout=TIMEOUT_S)
        assert load.dp_rank_count == 1 and load.loads[0].max_running_requests > 1
        assert stub(node).FlushCache(smg.FlushCacheRequest(), timeout=TIMEOUT_S).success
        assert stub(node).Abort(pb.AbortRequest(request_id="never-was"), timeout=TIMEOUT_S).success


def test_a_node_speaks_one_gateways_words_alone(decode):
    """smg asks for the health of every engine at once and takes the first that answers."""
    call = decode.channel.unary_unary("/vllm.grpc.engine.VllmEngine/HealthCheck")
    assert error_of(lambda: call(b"", timeout=TIMEOUT_S)).code() == Code.UNIMPLEMENTED
    subscribe = stub(decode).SubscribeKvEvents(smg.SubscribeKvEventsRequest(), timeout=TIMEOUT_S)
    assert error_of(lambda: list(subscribe)).code() == Code.UNIMPLEMENTED


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("case", [0, 1, 2])
def test_the_legs_meet_in_either_order(decode, prefill, golden, case, first, stream):
    g = golden("tiny-llama")
    name = f"legs-{case}-{first}-{stream}"
    legs = {"decode": decode, "prefill": prefill}
    second = "decode" if first == "prefill" else "prefill"
    fields = {"request_id": name, "stream": stream, "disaggregated_params": room(prefill, next(NUMBERS))}
    calls = {}
    for leg in (first, second):
        calls[leg] = start_leg(legs[leg], g.prompt(case), {"max_new_tokens": 24, "ignore_eos": True}, **fields)
        if leg == first:
            time.sleep(0.3)  # well within its wait, or long after it
    done = {leg: answer_of(call) for leg, call in calls.items()}
    tokens = list(done["decode"].complete.output_ids)
    matching_steps(tokens, g.tokens(case), g.margins(case), MARGIN)
    assert done["decode"].streamed == (tokens if stream else [])
    assert done["decode"].complete.cached_tokens >= len(g.prompt(case)) - 1
    assert list(done["prefill"].complete.output_ids) == tokens[:1]
    assert done["prefill"].complete.finish_reason == "length"


def test_every_message_names_its_request(decode, prefill):
    where = room(prefill, next(NUMBERS))
    legs = [start_leg(node, [5, 6, 7], {"max_new_tokens": 3, "ignore_eos": True}, request_id="named", stream=True,
                  disaggregated_params=where) for node in (prefill, decode)]
    for leg in legs:
        assert {message.request_id for message in leg} == {"named"}


def test_log_probabilities_come_as_asked(decode, prefill, golden):
    g = golden("tiny-llama")
    where = room(prefill, next(NUMBERS))
    fields = {"return_logprob": True, "top_logprobs_num": 2, "disaggregated_params": where}
    first = start_leg(prefill, g.prompt(1), {"max_new_tokens": 4, "ignore_eos": True}, **fields)
    done = generate(decode, g.prompt(1), {"max_new_tokens": 4, "ignore_eos": True}, **fields).complete
    answer_of(first)
    assert list(done.output_logprobs.token_ids) == list(done.output_ids)
    assert all(len(top.token_ids) == 2 for top in done.output_logprobs.top_logprobs)
    assert all(value <= 0 for value in done.output_logprobs.token_logprobs)


def test_a_room_used_twice_is_refused_at_both_nodes(decode, prefill, golden):
    prompt = golden("tiny-llama").prompt(1)
    where = room(prefill, next(NUMBERS))
    answer_of(start_leg(prefill, prompt, request_id="a", disaggregated_params=where))
    again = error_of(lambda: generate(prefill, prompt, request_id="b", disaggregated_params=where))
    assert reason(again) == (Code.ALREADY_EXISTS, "ROOM_TAKEN")
    source = source_pb2_grpc.KvSourceStub(prefill.channel)
    refused = generate_error(decode, [5, 6, 7], where)  # another prompt takes nothing from the expected one
    assert reason(refused) == (Code.FAILED_PRECONDITION, "SOURCE_MISMATCH")
    meet = source_pb2.AwaitPromptRequest(room=where.bootstrap_room, reader="first", prompt_digest=digest(prompt))
    met = source.AwaitPrompt(meet, timeout=TIMEOUT_S)
    assert met.expected and source.AwaitPrompt(meet, timeout=TIMEOUT_S).source_id == met.source_id
    assert reason(generate_error(decode, prompt, where)) == (Code.FAILED_PRECONDITION, "ROOM_TAKEN")
    source.Release(source_pb2.ReleaseRequest(source_id=met.source_id), timeout=TIMEOUT_S)
    # A room that was left is free for anybody.
    first = start_leg(prefill, prompt, request_id="c", disaggregated_params=where)
    assert len(generate(decode, prompt, {"max_new_tokens": 2}, disaggregated_params=where).complete.output_ids) == 2
    answer_of(first)


def test_a_decode_leg_alone_ends_in_time(decode, prefill, golden):
    """No prefill leg comes: after 10 s the room is free for anybody."""
    prompt, where = golden("tiny-llama").prompt(1), room(prefill, next(NUMBERS))
    began = time.monotonic()
    error = generate_error(decode, prompt, where)
    assert reason(error) == (Code.DEADLINE_EXCEEDED, "ROOM_EMPTY"), error
    assert 9 < time.monotonic() - began < 20 * SCALE
    first = start_leg(prefill, prompt, disaggregated_params=where)
    generate(decode, prompt, {"max_new_tokens": 2}, disaggregated_params=where)
    answer_of(first)


def test_a_prefill_leg_alone_is_held_for_its_lease(start, tiny_models):
    prefill = start("sluice-prefill", tiny_models("tiny-llama"), *SGLANG, "--hold-seconds", "1s")
    where = room(prefill, next(NUMBERS))
    generate(prefill, [5, 6, 7], disaggregated_params=where)
    assert held(prefill) > 0
    deadline = time.monotonic() + 5 * SCALE
    while held(prefill) > 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    generate(prefill, [5, 6, 7], disaggregated_params=where)  # and so is its room


def test_a_caller_that_leaves_a_room_takes_nothing_with_it(decode, prefill, golden):
    prompt, where = golden("tiny-llama").prompt(1), room(prefill, next(NUMBERS))
    waiting = start_leg(decode, prompt, {"max_new_tokens": 2}, disaggregated_params=where)
    time.sleep(0.2)
    waiting.cancel()
    with contextlib.suppress(grpc.RpcError):
        answer_of(waiting)
    source = source_pb2_grpc.KvSourceStub(prefill.channel)
    probe = source_pb2.AwaitPromptRequest(room=where.bootstrap_room, reader="another", prompt_digest=digest(prompt))
    # A moment later the room is not its own any more, and another leg may wait there.
    while rpc.reason_of(error_of(lambda: source.AwaitPrompt(probe, timeout=0.5))) == "ROOM_TAKEN":
        time.sleep(0.01)
    first = start_leg(prefill, prompt, request_id="new", disaggregated_params=where)
    answer_of(first)
    probe.room = where.bootstrap_room
    met = source.AwaitPrompt(probe, timeout=TIMEOUT_S)
    assert met.source_id and source.Release(source_pb2.ReleaseRequest(source_id=met.source_id)).found


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_an_abort_ends_the_leg_that_waits(decode, prefill, leg):
    """Keeps the prefill node busy, so that the legs wait for each other."""
    long = [(7 * i) % 500 for i in range(4000)]
    busy = [start_leg(prefill, long, request_id=f"busy-{i}", disaggregated_params=room(prefill, next(NUMBERS)))
            for i in range(6)]
    where = room(prefill, next(NUMBERS))
    legs = {name: start_leg(node, long[1:], {"max_new_tokens": 2}, request_id="aborted", disaggregated_params=where)
            for name, node in (("decode", decode), ("prefill", prefill))}
    # An abort that comes before its request finds nothing to end.
    while requests_at(decode) < 1 or requests_at(prefill) < len(busy) + 1:
        assert legs["prefill"].is_active(), "the prompt was computed before it could be aborted"
        time.sleep(0.005)
    node = {"decode": decode, "prefill": prefill}[leg]
    stub(node).Abort(pb.AbortRequest(request_id="aborted", reason="Stream dropped"), timeout=TIMEOUT_S)
    assert answer_of(legs[leg]).complete.finish_reason == "abort"
    if leg == "prefill":  # the other leg hears of it
        error = error_of(lambda: answer_of(legs["decode"]))
        assert reason(error) == (Code.NOT_FOUND, "SOURCE_NOT_FOUND"), error
    else:
        stub(prefill).Abort(pb.AbortRequest(request_id="aborted"), timeout=TIMEOUT_S)
        answer_of(legs["prefill"])
    for i, call in enumerate(busy):
        stub(prefill).Abort(pb.AbortRequest(request_id=f"busy-{i}"), timeout=TIMEOUT_S)
        answer_of(call)


def test_what_a_prefill_leg_failed_with_is_the_decode_legs_too(start, tiny_models, decode):
    prefill = start("sluice-prefill", tiny_models("tiny-llama"), *SGLANG, "--hold-bytes", "512KiB")
    prompt = list(range(1, 400))  # its caches take more memory, so that a router would gain nothing by trying again
    fields = {"disaggregated_params": room(prefill, next(NUMBERS))}
    waiting = start_leg(decode, prompt, {"max_new_tokens": 2}, **fields)
    time.sleep(0.3)
    assert error_of(lambda: generate(prefill, prompt, **fields)).code() == Code.INVALID_ARGUMENT
    error = error_of(lambda: answer_of(waiting))
    assert reason(error) == (Code.FAILED_PRECONDITION, "PREFILL_FAILED") and "hold_bytes" in error.details()


def test_a_source_that_is_none_is_said_so(decode, prefill):
    where = room(decode, next(NUMBERS))  # a decode node holds no prompts
    assert reason(generate_error(decode, [5, 6], where)) == (Code.UNAVAILABLE, "SOURCE_UNREACHABLE")
    where = pb.DisaggregatedParams(bootstrap_host="127.0.0.1", bootstrap_port=1, bootstrap_room=5)
    assert reason(generate_error(decode, [5, 6], where)) == (Code.UNAVAILABLE, "SOURCE_UNREACHABLE")
    where = pb.DisaggregatedParams(bootstrap_host="prefill.example", bootstrap_port=7000, bootstrap_room=5)
    assert reason(generate_error(decode, [5, 6], where)) == (Code.PERMISSION_DENIED, "SOURCE_NOT_ALLOWED")


@pytest.mark.parametrize("field,value", [("reader", ""), ("reader", "x" * 129), ("tenant", "x" * 129),
                                         ("prompt_digest", "0" * 129)])
def test_a_visit_that_cannot_be_names_its_fault(prefill, field, value):
    meet = source_pb2.AwaitPromptRequest(**{"room": 5, "reader": "r", "prompt_digest": "0" * 64, field: value})
    error = error_of(lambda: source_pb2_grpc.KvSourceStub(prefill.channel).AwaitPrompt(meet, timeout=TIMEOUT_S))
    assert error.code() == Code.INVALID_ARGUMENT
    assert rpc.details_of(error)["BadRequest"].field_violations[0].field == field


def test_a_prefill_node_for_vllm_has_no_rooms(start, tiny_models, decode):
    prefill = start("sluice-prefill", tiny_models("tiny-llama"), "--hbm-bytes", "8MiB")
    error = generate_error(decode, [5, 6], room(prefill, 1))
    assert error.code() == Code.FAILED_PRECONDITION and "--gateway sglang" in error.details()


ROOM = pb.DisaggregatedParams(bootstrap_host="127.0.0.1", bootstrap_port=7000, bootstrap_room=5)
TENSOR = pb.TensorData(data=b"1", shape=[1], dtype="uint32")


def params(**changes) -> pb.DisaggregatedParams:
    out = pb.DisaggregatedParams()
    out.CopyFrom(ROOM)
    for name, value in changes.items():
        setattr(out, name, value)
    return out


BAD = [
    ("sampling_params.temperature", {"temperature": -1}, {}), ("sampling_params.top_p", {"top_p": 1.5}, {}),
    ("sampling_params.top_k", {"top_k": -2}, {}), ("sampling_params.n", {"n": 2}, {}),
    ("sampling_params.max_new_tokens", {"max_new_tokens": 0}, {}),
    ("sampling_params.min_new_tokens", {"max_new_tokens": 2, "min_new_tokens": 3}, {}),
    ("sampling_params.stop_token_ids", {"stop_token_ids": [512]}, {}),
    ("sampling_params.stop", {"stop": ["x"]}, {}),  # this model has no tokenizer
    ("sampling_params.logit_bias", {"logit_bias": {"x": 1}}, {}),
    ("sampling_params.logit_bias", {"logit_bias": {"512": 1}}, {}),
    ("sampling_params.logit_bias", {"logit_bias": {"-1": 1}}, {}),
    ("sampling_params.regex", {"regex": "a+"}, {}), ("sampling_params.json_schema", {"json_schema": "{}"}, {}),
    ("sampling_params.ebnf_grammar", {"ebnf_grammar": "root ::= x"}, {}),
    ("sampling_params.structural_tag", {"structural_tag": "{}"}, {}),
    ("sampling_params.stream_interval", {"stream_interval": 8}, {}),
    ("sampling_params.custom_params", {"custom_params": {"a": 1}}, {}),
    ("logprob_start_len", {}, {"return_logprob": True, "logprob_start_len": 0}),
    ("top_logprobs_num", {}, {"return_logprob": True, "top_logprobs_num": 21}),
    ("top_logprobs_num", {}, {"top_logprobs_num": -1}),
    ("token_ids_logprob", {}, {"token_ids_logprob": [3]}),
    ("return_hidden_states", {}, {"return_hidden_states": True}),
    ("custom_logit_processor", {}, {"custom_logit_processor": "code"}),
    ("input_embeds", {}, {"input_embeds": [1.0]}), ("lora_id", {}, {"lora_id": "x"}),
    ("require_reasoning", {}, {"require_reasoning": True}), ("data_parallel_rank", {}, {"data_parallel_rank": 1}),
    ("mm_inputs", {}, {"mm_inputs": pb.MultimodalInputs(pixel_values=TENSOR)}),
    ("request_id", {}, {"request_id": "x" * 129}),
    ("disaggregated_params", {}, {"disaggregated_params": None}),
    ("disaggregated_params.bootstrap_room", {}, {"disaggregated_params": params(bootstrap_room=-1)}),
]
BAD_AT_DECODE = [
    ("disaggregated_params.bootstrap_host", {}, {"disaggregated_params": params(bootstrap_host="")}),
    ("disaggregated_params.bootstrap_host", {}, {"disaggregated_params": params(bootstrap_host="a b")}),
    ("disaggregated_params.bootstrap_port", {}, {"disaggregated_params": params(bootstrap_port=0)}),
    ("disaggregated_params.bootstrap_port", {}, {"disaggregated_params": params(bootstrap_port=65536)}),
]


@pytest.mark.parametrize("role,field,sampling,fields", [
    *(("decode", *case) for case in BAD + BAD_AT_DECODE),
    # A prefill node checks only that stop strings and lengths are possible.
    *(("prefill", *case) for case in BAD if case[0].rpartition(".")[2] not in ("stop", "max_new_tokens", "min_new_tokens"))])
def test_a_bad_leg_names_its_fault(decode, prefill, role, field, sampling, fields):
    node = decode if role == "decode" else prefill
    fields = {name: value for name, value in {"disaggregated_params": ROOM, **fields}.items() if value is not None}
    error = error_of(lambda: generate(node, [5, 6], sampling, **fields))
    assert error.code() == Code.INVALID_ARGUMENT, error
    named = rpc.details_of(error)["BadRequest"].field_violations[0].field
    assert named == field, error.details()


def test_a_field_of_the_future_is_refused(decode):
    message = pb.GenerateRequest.FromString(request([5], disaggregated_params=ROOM).SerializeToString() + b"\xc0\x3e\x01")
    error = error_of(lambda: list(stub(decode).Generate(message, timeout=TIMEOUT_S)))
    assert error.code() == Code.INVALID_ARGUMENT and "1000" in error.details()
