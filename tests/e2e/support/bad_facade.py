"""Bad calls of the façade of vllm.grpc.engine.VllmEngine."""

import math

import grpc
from smg_grpc_proto.generated import common_pb2 as smg
from support.bad_calls import MAX32, VOCABULARY, BadCall, Site
from support.nodes import TIMEOUT_S
from support.vllm_client import HOLD, pb, request, stub

Code = grpc.StatusCode


def generate(site: Site, message=None, **fields):
    return stub(site.node).Generate(message or request([5, 6], {"max_tokens": 2}, **fields), timeout=TIMEOUT_S)


def with_unknown_field(message, data: bytes):
    """Returns the bytes of a message with an additional field that its type does not have."""
    return type(message).FromString(message.SerializeToString() + data)


# The field of sampling_params that the error names, and the settings that are wrong.
SAMPLING = [
    ("temperature", {"temperature": math.nan}), ("temperature", {"temperature": -1}),
    ("top_p", {"top_p": 1.5}), ("top_p", {"top_p": -0.5}), ("min_p", {"min_p": 2}),
    ("top_k", {"top_k": VOCABULARY + 1}), ("top_k", {"top_k": MAX32}),
    ("repetition_penalty", {"repetition_penalty": -1}), ("frequency_penalty", {"frequency_penalty": 3}),
    ("presence_penalty", {"presence_penalty": math.inf}),
    ("max_tokens", {"max_tokens": 0}), ("min_tokens", {"max_tokens": 2, "min_tokens": 3}),
    ("stop_token_ids", {"stop_token_ids": [VOCABULARY]}), ("stop", {"stop": ["x"]}),  # this model has no tokenizer
    ("stop", {"stop": ["a"] * 17}), ("stop[0]", {"stop": ["x" * 257]}),
    ("logit_bias", {"logit_bias": {VOCABULARY: 1}}), ("logit_bias", {"logit_bias": {-1: 1}}),
    ("logit_bias", {"logit_bias": {3: 101}}),
    ("n", {"n": 2}), ("logprobs", {"logprobs": -1}), ("logprobs", {"logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": 0}), ("truncate_prompt_tokens", {"truncate_prompt_tokens": -1}),
    ("grammar_from_first_token", {"grammar_from_first_token": True}),
    ("json_schema", {"json_schema": '{"type":"object"}'}), ("regex", {"regex": "a+"}),
    ("grammar", {"grammar": "root ::= x"}), ("structural_tag", {"structural_tag": "{}"}),
    ("json_object", {"json_object": True}), ("choice", {"choice": pb.ChoiceConstraint(choices=["a"])}),
]

HANDOFFS = ["nonsense", "[]", "{", '{"do_remote_prefill":1}', HOLD, "{}" + " " * 5000,
            '{"a":' * 100 + "1" + "}" * 100]
OTHER_HANDOFFS = ['{"do_remote_prefill":true}', '{"connector":"NixlConnector"}',
                  '{"do_remote_prefill":true,"remote_engine_id":"x","remote_block_ids":[1],"remote_host":"h"}']

FACADE_CALLS = [
    *[BadCall(f"vLLM Generate {field}={settings[field.split('[')[0]]!r}"[:80],
              lambda s, v=settings: generate(s, request([5, 6], {"max_tokens": 2, **v})),
              field=f"sampling_params.{field}") for field, settings in SAMPLING],
    *[BadCall(f"vLLM Generate handoff {text[:40]}", lambda s, v=text: generate(s, kv_transfer_params_json=v),
              field="kv_transfer_params_json") for text in HANDOFFS],
    *[BadCall(f"vLLM Generate handoff {text[:40]}", lambda s, v=text: generate(s, kv_transfer_params_json=v),
              field="kv_transfer_params_json.connector") for text in OTHER_HANDOFFS],
    BadCall("vLLM Generate without a handoff where prompts are not computed", generate,
            field="kv_transfer_params_json", reason="NO_HANDOFF"),
    BadCall("vLLM Generate text", lambda s: generate(s, pb.GenerateRequest(text="hello")), field="text"),
    BadCall("vLLM Generate nothing", lambda s: generate(s, pb.GenerateRequest()), field="tokenized.input_ids"),
    BadCall("vLLM Generate outside the vocabulary", lambda s: generate(s, request([5, VOCABULARY])),
            field="tokenized.input_ids[1]"),
    BadCall("vLLM Generate past the context", lambda s: generate(s, request([5] * 4097)),
            field="tokenized.input_ids"),
    BadCall("vLLM Generate a long name", lambda s: generate(s, request_id="x" * 129), field="request_id"),
    BadCall("vLLM Generate images", lambda s: generate(s, mm_inputs=pb.MultimodalInputs(mm_hashes=["x"])),
            field="mm_inputs"),
    BadCall("vLLM Generate more images", lambda s: generate(s, extra_mm_inputs=[pb.MultimodalInputs()]),
            field="extra_mm_inputs"),
    BadCall("vLLM Generate media", lambda s: generate(s, media_refs=pb.MediaRefs()), field="media_refs"),
    BadCall("vLLM Generate another connector's form",
            lambda s: generate(s, kv_transfer_params=pb.KvTransferParams(remote_host="h", remote_port=1)),
            field="kv_transfer_params"),
    BadCall("vLLM Generate another rank", lambda s: generate(s, data_parallel_rank=1), field="data_parallel_rank"),
    BadCall("vLLM Generate a field of the future",
            lambda s: generate(s, with_unknown_field(request([5]), b"\xc0\x3e\x01")), field="message"),
    BadCall("vLLM Generate bytes that are no message",
            lambda s: s.node.channel.unary_stream("/vllm.grpc.engine.VllmEngine/Generate")(b"\xff\xff",
                                                                                         timeout=TIMEOUT_S),
            field="message"),
    BadCall("vLLM GetLoads another rank", lambda s: stub(s.node).GetLoads(
        pb.GetLoadsRequest(dp_rank=1), timeout=TIMEOUT_S), field="dp_rank"),
    BadCall("vLLM FlushCache at a time that is past", lambda s: stub(s.node).FlushCache(
        smg.FlushCacheRequest(timeout_s=-1), timeout=TIMEOUT_S), field="timeout_s"),
    BadCall("vLLM Abort nobody's name", lambda s: stub(s.node).Abort(
        pb.AbortRequest(request_ids=["a", ""]), timeout=TIMEOUT_S), field="request_ids[1]"),
    BadCall("vLLM Abort too many", lambda s: stub(s.node).Abort(
        pb.AbortRequest(request_ids=["a"] * 1025), timeout=TIMEOUT_S), field="request_ids"),
    BadCall("vLLM GetTokenizer where there is none", lambda s: stub(s.node).GetTokenizer(
        smg.GetTokenizerRequest(), timeout=TIMEOUT_S), code=Code.NOT_FOUND),
]
