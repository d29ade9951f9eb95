"""The façade of vllm.grpc.engine.VllmEngine on a decode node, as the gateway `smg` calls it."""

import hashlib
import io
import json
import zipfile

import grpc
import pytest
from sluice.v1 import admin_pb2, decode_pb2
from sluice_client import rpc
from smg_grpc_proto.generated import common_pb2 as smg
from support import vllm_client
from support.nodes import TIMEOUT_S, error_of, greedy, matching_steps, tokens_of
from support.vllm_client import answer_of, generate, pb, request, stub

MARGIN = 0.15  # bf16 caches and activations


@pytest.fixture(scope="module")
def node(start, tiny_models):
    return start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "8MiB", "--dram-bytes", "8MiB",
                 "--max-sequences", "4", "--local-prefill", "always", "--served-model-name", "a-name")


@pytest.fixture(autouse=True)
def memory_comes_back(node):
    before = node.settled()
    yield
    node.wait_until_held(before)


def test_a_gateway_learns_what_the_node_is(node):
    vllm = stub(node)
    assert vllm.HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT_S).healthy
    model = vllm.GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT_S)
    assert (model.served_model_name, model.model_type, model.is_generation) == ("a-name", "llama", True)
    assert (model.vocab_size, model.max_context_length, list(model.eos_token_ids)) == (512, 4096, [2])
    assert list(model.architectures) == ["LlamaForCausalLM"] and model.tokenizer_path == model.model_path
    server = vllm.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
    assert (server.max_num_seqs, server.block_size, server.kv_connector) == (4, 32, "SluiceConnector")
    assert server.kv_role == "kv_consumer" and server.uptime_seconds > 0 and len(server.kv_engine_id) == 32
    loads = vllm.GetLoads(pb.GetLoadsRequest(include=["core", "disagg", "queues", "memory"]), timeout=TIMEOUT_S)
    assert loads.dp_rank_count == 1 and loads.loads[0].max_running_requests == 4
    assert loads.loads[0].num_total_reqs == 0 and loads.loads[0].max_total_num_tokens > 4096
    assert vllm.FlushCache(smg.FlushCacheRequest(), timeout=TIMEOUT_S).success


@pytest.mark.parametrize("method,message", [
    ("vllm.grpc.engine.VllmEngine/SubscribeKvEvents", smg.SubscribeKvEventsRequest()),
    ("vllm.grpc.engine.VllmEngine/Embed", pb.EmbedRequest()),
    *[(f"{service}/HealthCheck", pb.HealthCheckRequest()) for service in (
        "tokenspeed.grpc.scheduler.TokenSpeedScheduler", "mlx.grpc.engine.MlxEngine",
        "trtllm.TrtllmService")]])
def test_what_is_not_served_is_unimplemented(node, method, message):
    call = node.channel.unary_unary(f"/{method}", request_serializer=lambda m: m.SerializeToString())
    assert error_of(lambda: call(message, timeout=TIMEOUT_S)).code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("case", [0, 1, 2])
def test_greedy_tokens_are_the_golden_ones(node, golden, case, stream):
    g = golden("tiny-llama")
    answer = generate(node, g.prompt(case), {"max_tokens": 24, "ignore_eos": True}, stream=stream,
                      request_id=f"golden-{case}-{stream}")
    done = answer.complete
    matching_steps(list(done.output_ids), g.tokens(case), g.margins(case), MARGIN)
    assert done.finish_reason == "length" and done.prompt_tokens == len(g.prompt(case))
    assert done.completion_tokens == 24
    assert answer.streamed == (list(done.output_ids) if stream else [])
    if stream:
        assert answer.chunks[-1].completion_tokens == 24


def test_a_stop_token_is_named_and_is_the_last(node, golden):
    g = golden("tiny-llama")
    tokens = list(generate(node, g.prompt(1), {"max_tokens": 8, "ignore_eos": True}).complete.output_ids)
    stop = tokens[4]
    done = generate(node, g.prompt(1), {"max_tokens": 8, "ignore_eos": True, "stop_token_ids": [stop]},
                    stream=True).complete
    assert list(done.output_ids) == tokens[:tokens.index(stop) + 1]
    assert done.finish_reason == "stop" and done.matched_token_id == stop


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_are_beside_their_tokens(node, golden, stream):
    answer = generate(node, golden("tiny-llama").prompt(1), {"max_tokens": 5, "ignore_eos": True, "logprobs": 3},
                      stream=stream)
    parts = [c.output_logprobs for c in answer.chunks] if stream else [answer.complete.output_logprobs]
    ids = [i for part in parts for i in part.token_ids]
    assert ids == list(answer.complete.output_ids)
    for part in parts:
        for logprob, token, top in zip(part.token_logprobs, part.token_ids, part.top_logprobs, strict=True):
            assert len(top.values) == 3 and top.token_ids[0] == token
            assert top.values[0] == logprob <= 0 and sorted(top.values, reverse=True) == list(top.values)


def test_seed_bias_and_penalties_reach_the_sampler(node, golden):
    prompt = golden("tiny-llama").prompt(1)
    sampled = {"temperature": 1.5, "max_tokens": 16, "ignore_eos": True}

    def ids(**settings):
        return list(generate(node, prompt, {**sampled, **settings}).complete.output_ids)

    assert ids(seed=-7) == ids(seed=-7) != ids(seed=8)
    assert ids(logit_bias={9: 100}, temperature=0)[0] == 9
    plain = list(generate(node, prompt, {"max_tokens": 16, "ignore_eos": True}).complete.output_ids)
    assert ids(temperature=0, repetition_penalty=5) != plain


@pytest.mark.parametrize("kv", ["{}", '{"do_remote_prefill":false}', ""])
def test_a_leg_without_a_handoff_is_computed_here(node, golden, kv):
    done = generate(node, golden("tiny-llama").prompt(0), {"max_tokens": 2}, kv_transfer_params_json=kv).complete
    assert done.completion_tokens >= 1


def test_where_prompts_are_not_computed_such_a_leg_is_a_bad_request(small, golden):
    error = error_of(lambda: generate(small, golden("tiny-llama").prompt(0), {"max_tokens": 2}))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and rpc.reason_of(error) == "NO_HANDOFF"
    assert rpc.details_of(error)["BadRequest"].field_violations[0].field == "kv_transfer_params_json"


def test_an_abort_ends_a_stream_with_what_it_has(node, golden):
    stream = stub(node).Generate(request(golden("tiny-llama").prompt(1), {"max_tokens": 3000, "ignore_eos": True},
                                         stream=True, request_id="to-abort"), timeout=TIMEOUT_S)
    first = next(iter(stream))
    stub(node).Abort(pb.AbortRequest(request_ids=["to-abort", "never-there"]), timeout=TIMEOUT_S)
    answer = answer_of(stream)
    done = answer.complete
    assert done.finish_reason == "abort"
    assert list(done.output_ids) == [*first.chunk.token_ids, *answer.streamed]


def test_a_caller_that_hangs_up_frees_its_sequence(node, golden):
    stream = stub(node).Generate(request(golden("tiny-llama").prompt(1), {"max_tokens": 3000, "ignore_eos": True},
                                         stream=True), timeout=TIMEOUT_S)
    next(iter(stream))
    stream.cancel()
    node.settled()


def test_both_dialects_meet_in_one_engine(node, golden):
    prompt = golden("tiny-llama").prompt(1)
    ours, _ = tokens_of(node.decode.Generate(decode_pb2.GenerateRequest(
        prompt_token_ids=prompt, sampling=greedy(max_tokens=12, ignore_eos=True)), timeout=TIMEOUT_S))
    theirs = generate(node, prompt, {"max_tokens": 12, "ignore_eos": True}).complete
    assert [t.id for t in ours] == list(theirs.output_ids)


def test_a_draining_node_is_not_healthy(node):
    node.admin.Drain(admin_pb2.DrainRequest(), timeout=TIMEOUT_S)
    try:
        health = stub(node).HealthCheck(pb.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert not health.healthy and "draining" in health.message
        error = error_of(lambda: generate(node, [5, 6], {"max_tokens": 2}))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert stub(node).GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S).is_paused
    finally:
        node.admin.Resume(admin_pb2.ResumeRequest(), timeout=TIMEOUT_S)


def test_the_tokenizer_comes_as_a_zip(start, tiny_models, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_models("tiny-llama").iterdir():
        (model / path.name).symlink_to(path)
    # The vocabulary has one token for each byte, and is large enough for several messages.
    text = json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [],
                       "decoder": {"type": "ByteLevel"}}) + " " * (3 << 20)
    (model / "tokenizer.json").write_text(text)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    node = start("sluice-server", model, "--hbm-bytes", "4MiB", "--dram-bytes", "4MiB")
    chunks = list(vllm_client.stub(node).GetTokenizer(smg.GetTokenizerRequest(), timeout=TIMEOUT_S))
    data = b"".join(c.data for c in chunks)
    assert len(chunks) > 2 and not any(c.sha256 for c in chunks[:-1])
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.read("tokenizer.json").decode() == text
        assert {"config.json", "chat_template.jinja"} <= set(archive.namelist())


def test_without_a_tokenizer_there_is_none_to_fetch(node):
    error = error_of(lambda: stub(node).GetTokenizer(smg.GetTokenizerRequest(), timeout=TIMEOUT_S))
    assert error.code() == grpc.StatusCode.NOT_FOUND
