"""Bad calls of Decode, Prefill and Admin."""

import math

import grpc
from google.protobuf import duration_pb2
from sluice.v1 import admin_pb2, decode_pb2, prefill_pb2
from support.bad_calls import CONTEXT, MAX32, NOT_THERE, UNKNOWN_ID, VOCABULARY, BadCall, Site, sampling
from support.nodes import TIMEOUT_S

Code = grpc.StatusCode
NAN, INF = math.nan, math.inf


def generate(site: Site, **request):
    return site.node.decode.Generate(decode_pb2.GenerateRequest(**request), timeout=TIMEOUT_S)


def run(site: Site, **request):
    return site.prefill.prefill.Run(prefill_pb2.RunRequest(
        **{"prompt_token_ids": [5, 6], "sampling": sampling({}), "decode_address": site.node.address, **request}),
        timeout=TIMEOUT_S)


# The field of SamplingParams that the error names, and the settings that are wrong. SAMPLING_OF_DECODE has the
# settings that only a decode node refuses.
SAMPLING = [
    *[("temperature", {"temperature": v}) for v in (NAN, INF, -INF, -0.1, 100.5)],
    *[("top_p", {"top_p": v}) for v in (NAN, 0, -0.5, 1.01, INF)],
    *[("min_p", {"min_p": v}) for v in (NAN, -0.1, 1.1)],
    *[("repetition_penalty", {"repetition_penalty": v}) for v in (NAN, 0, -1, 101, INF)],
    *[("frequency_penalty", {"frequency_penalty": v}) for v in (NAN, -2.1, 2.1)],
    *[("presence_penalty", {"presence_penalty": v}) for v in (NAN, -2.1, 2.1)],
    *[("top_k", {"top_k": v}) for v in (VOCABULARY + 1, MAX32)],
    *[("logit_bias", {"logit_bias": v}) for v in (
        {3: NAN}, {3: INF}, {3: 100.5}, {3: -100.5}, {VOCABULARY: 1}, {MAX32: 1},
        {i: 1.0 for i in range(1025)})],
    ("min_tokens", {"min_tokens": 9}), ("min_tokens", {"min_tokens": MAX32}),
    ("max_tokens", {"max_tokens": 0}),
    *[("stop_token_ids", {"stop_token_ids": v}) for v in ([VOCABULARY], [MAX32], list(range(33)))],
    ("logprobs", {"logprobs": 21}), ("logprobs", {"logprobs": MAX32}),
    ("n", {"n": 2}), ("n", {"n": 0}), ("n", {"n": MAX32}),
]
SAMPLING_OF_DECODE = [
    ("max_tokens", {"max_tokens": 25}), ("max_tokens", {"max_tokens": MAX32}),  # 24 tokens are reserved
    ("stop", {"stop": ["x"]}),  # this model's directory has no tokenizer
    ("stop", {"stop": ["a"] * 17}), ("stop[1]", {"stop": ["a", "x" * 257]}),
]


def sampling_cases() -> list[BadCall]:
    cases = [BadCall(f"Generate {settings}", lambda s, v=settings: generate(
        s, transfer_id=s.ready, sampling=sampling(v)), field=f"sampling.{field}")
        for field, settings in SAMPLING + SAMPLING_OF_DECODE]
    cases += [BadCall(f"Run {settings}", lambda s, v=settings: run(s, sampling=sampling(v)),
                      field=f"sampling.{field}")
              for field, settings in SAMPLING]
    return cases


def twice(site: Site):
    """Starts two Generates for one transfer; the first has arrived before the second comes."""
    transfer = site.transfer()
    first = site.node.decode.Generate(decode_pb2.GenerateRequest(
        request_id="twice", transfer_id=transfer.id, sampling=sampling({})), timeout=TIMEOUT_S)
    while not any(q.request_id == "twice" for q in site.node.admin.ListSequences(
            admin_pb2.ListSequencesRequest(), timeout=TIMEOUT_S).sequences):
        pass
    try:
        list(generate(site, transfer_id=transfer.id, sampling=sampling({})))
    finally:
        first.cancel()


def again(site: Site):
    """Starts a Generate for a transfer that another Generate has decoded."""
    request = decode_pb2.GenerateRequest(transfer_id=site.committed().id, sampling=sampling({}))
    list(site.node.decode.Generate(request, timeout=TIMEOUT_S))
    return site.node.decode.Generate(request, timeout=TIMEOUT_S)


def decode_cases() -> list[BadCall]:
    prompts = {"no prompt": ([], ""), "a token outside": ([VOCABULARY], "[0]"),
               "token 2^32 - 1": ([5, MAX32], "[1]"), "a prompt over the context": ([5] * (CONTEXT + 1), "")}
    return [
        *[BadCall(f"Generate {name}", lambda s, p=prompt: generate(s, prompt_token_ids=p, sampling=sampling({})),
                  field=f"prompt_token_ids{at}") for name, (prompt, at) in prompts.items()],
        *[BadCall(f"Run {name}", lambda s, p=prompt: run(s, prompt_token_ids=p), field=f"prompt_token_ids{at}")
          for name, (prompt, at) in prompts.items()],
        *[BadCall(f"Generate transfer {v!r}", lambda s, v=v: generate(s, transfer_id=v, sampling=sampling({})),
                  words=v, **NOT_THERE) for v in (UNKNOWN_ID, "nonsense", "../../etc", "ü" * 16)],
        BadCall("Generate empty transfer", lambda s: generate(s, transfer_id="", sampling=sampling({})),
                field="transfer_id"),
        BadCall("Generate long transfer", lambda s: generate(s, transfer_id="0" * 65, sampling=sampling({})),
                field="transfer_id"),
        BadCall("Generate empty sequence", lambda s: generate(s, sequence_id="", sampling=sampling({})),
                field="sequence_id"),
        *[BadCall(f"Generate sequence {v!r}", lambda s, v=v: generate(s, sequence_id=v, sampling=sampling({})),
                  Code.NOT_FOUND, reason="SEQUENCE_NOT_FOUND", words=v) for v in (UNKNOWN_ID, "nonsense")],
        BadCall("Generate on a transfer as a sequence", lambda s: generate(
            s, sequence_id=s.ready, sampling=sampling({})), Code.NOT_FOUND, reason="SEQUENCE_NOT_FOUND"),
        *[BadCall(f"Generate keep {v}", lambda s, v=v: generate(
            s, transfer_id=s.ready, keep=duration_pb2.Duration(seconds=v), sampling=sampling({})), field="keep")
          for v in (-1, 0, 86401)],
        BadCall("Forget nothing", lambda s: s.node.decode.Forget(decode_pb2.ForgetRequest(), timeout=TIMEOUT_S),
                field="sequence_id"),
        BadCall("Generate empty key", lambda s: generate(s, rendezvous_key="", sampling=sampling({})),
                field="rendezvous_key"),
        *[BadCall(f"Generate long {field}", lambda s, f=field: generate(
            s, **{"rendezvous_key": "k", "sampling": sampling({}), f: "x" * 129}), field=field)
          for field in ("request_id", "rendezvous_key", "tenant")],
        *[BadCall(f"Run long {field}", lambda s, f=field: run(s, **{f: "x" * 129}), field=field)
          for field in ("rendezvous_key", "tenant")],
        *[BadCall(f"Run to {address!r:.30}", lambda s, a=address: run(s, decode_address=a), field="decode_address")
          for address in ("nonsense", "127.0.0.1:99999", "127.0.0.1:0", "[::1:7000", "a b:1", "x:1/../y",
                          "dns:///x", "h" * 300 + ":1")],
        BadCall("Generate another prompt", lambda s: generate(
            s, transfer_id=s.ready, prompt_token_ids=[1, 2, 3], sampling=sampling({})), field="prompt_token_ids"),
        BadCall("Generate without handoff", lambda s: generate(s, prompt_token_ids=[1, 2], sampling=sampling({})),
                Code.FAILED_PRECONDITION, reason="NO_HANDOFF", words="local_prefill"),
        BadCall("Generate twice", twice, Code.ALREADY_EXISTS, reason="GENERATE_EXISTS"),
        BadCall("Generate after a Generate", again, **NOT_THERE),
        BadCall("Cancel nobody", lambda s: s.node.decode.Cancel(decode_pb2.CancelRequest(), timeout=TIMEOUT_S),
                field="request_id"),
        BadCall("Cancel a long name", lambda s: s.node.decode.Cancel(
            decode_pb2.CancelRequest(request_id="x" * 129), timeout=TIMEOUT_S), field="request_id"),
        *[BadCall(f"ListSequences {limit}", lambda s, v=limit: s.node.admin.ListSequences(
            admin_pb2.ListSequencesRequest(limit=v), timeout=TIMEOUT_S), field="limit")
          for limit in (10001, MAX32)],
    ]


DECODE_CALLS = sampling_cases() + decode_cases()
