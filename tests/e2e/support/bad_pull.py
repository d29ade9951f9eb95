"""Bad calls of KvSource, and Generates with a wrong source."""

import grpc
from google.protobuf import duration_pb2
from sluice.v1 import decode_pb2, prefill_pb2, source_pb2, source_pb2_grpc
from support.bad_calls import CONTEXT, LAYERS, MAX32, UNKNOWN_ID, BadCall, Site, sampling
from support.nodes import TIMEOUT_S

Code = grpc.StatusCode
PROMPT = [(i * 37) % 250 + 3 for i in range(70)]
NO_SOURCE = {"code": Code.NOT_FOUND, "reason": "SOURCE_NOT_FOUND"}


def hold(site: Site, **request) -> source_pb2.KvSourceRef:
    return site.prefill.prefill.Run(prefill_pb2.RunRequest(prompt_token_ids=PROMPT, sampling=sampling({}), **request),
                                    timeout=TIMEOUT_S).source


def source(site: Site) -> source_pb2_grpc.KvSourceStub:
    return source_pb2_grpc.KvSourceStub(site.prefill.channel)


def ask(method: str, site: Site, **fields):
    """Calls a method of KvSource about a prompt that is held, unless `fields` say otherwise."""
    held = {} if "source_id" in fields else {"source_id": hold(site).source_id}
    request = getattr(source_pb2, f"{method}Request")(**held, **fields)
    answer = getattr(source(site), method)(request, timeout=TIMEOUT_S)
    return list(answer) if method == "Read" else answer


def read_range(site: Site, **change):
    good = {"layer": 0, "kind": "kv", "head_begin": 0, "head_end": 1, "token_begin": 0, "token_end": 8}
    held = source_pb2.ReadRequest(source_id=hold(site).source_id)
    held.ranges.add(**(good | change))
    return list(source(site).Read(held, timeout=TIMEOUT_S))


def read_many_ranges(site: Site):
    request = source_pb2.ReadRequest(source_id=hold(site).source_id)
    for _ in range(4097):
        request.ranges.add(kind="kv", head_end=1, token_end=8)
    return list(source(site).Read(request, timeout=TIMEOUT_S))


def released(site: Site) -> source_pb2.KvSourceRef:
    held = hold(site)
    source(site).Release(source_pb2.ReleaseRequest(source_id=held.source_id), timeout=TIMEOUT_S)
    return held


def by_link(site: Site, **read):
    return source(site).ReadByLink(source_pb2.ReadByLinkRequest(
        read=source_pb2.ReadRequest(**({"source_id": hold(site).source_id} | read))), timeout=TIMEOUT_S)


def read_bytes(body: bytes):
    return lambda s: list(s.prefill.channel.unary_stream("/sluice.v1.KvSource/Read")(body, timeout=TIMEOUT_S))


def pull(site: Site, of=hold, prompt=PROMPT, change=None, settings=None, **request):
    """Starts a Generate with the source `of(site)`, changed by `change`."""
    ref = of(site)
    for name, value in (change or {}).items():
        setattr(ref, name, value(site) if callable(value) else value)
    return list(site.node.decode.Generate(decode_pb2.GenerateRequest(
        source=ref, prompt_token_ids=prompt, sampling=sampling(settings or {}), **request), timeout=TIMEOUT_S))


REFERENCES = [
    ("source.address", {"address": value}) for value in
    ("", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "no port", "x" * 300, "dns:///a:1", "a b:1")
] + [
    ("source.source_id", {"source_id": value}) for value in ("", "12", "z" * 32, "0" * 33)
] + [
    ("source.prompt_digest", {"prompt_digest": value}) for value in ("ab", "z" * 64)
] + [
    ("source.model_fingerprint", {"model_fingerprint": value}) for value in ("ab", "z" * 64)
]

PULL_CALLS = [
    *[BadCall(f"KvSource.{method} long {field}",
              lambda s, m=method, f=field: ask(m, s, **{"source_id": UNKNOWN_ID, f: "x" * 129}), field=field)
      for method in ("Describe", "Read", "Renew", "Release") for field in ("source_id", "tenant")],
    *[BadCall(f"KvSource.{method} of nothing", lambda s, m=method: ask(m, s, source_id=UNKNOWN_ID), **NO_SOURCE)
      for method in ("Describe", "Read", "Renew")],
    *[BadCall(f"KvSource.{method} of another tenant's", lambda s, m=method: ask(m, s, tenant="b"), **NO_SOURCE)
      for method in ("Describe", "Read", "Renew")],
    *[BadCall(f"KvSource.ReadByLink of {what}", lambda s, m=more: by_link(s, **m), **NO_SOURCE)
      for what, more in (("nothing", {"source_id": UNKNOWN_ID}), ("another tenant's", {"tenant": "b"}))],
    *[BadCall(f"KvSource.ReadByLink long {field}", lambda s, f=field: by_link(s, **{f: "x" * 129}), field=field)
      for field in ("source_id", "tenant")],
    BadCall("KvSource.Read of what was released", lambda s: ask("Read", s, source_id=released(s).source_id), **NO_SOURCE),
    *[BadCall(f"KvSource.Renew for {seconds} s {nanos} ns",
              lambda s, t=(seconds, nanos): ask("Renew", s, lease=duration_pb2.Duration(seconds=t[0], nanos=t[1])),
              field="lease")
      for seconds, nanos in ((0, 0), (-1, 0), (0, -5), (1, 2_000_000_000))],
    *[BadCall(f"KvSource.Read range {change}", lambda s, c=change: read_range(s, **c), field=f"ranges[0].{field}")
      for field, change in (("layer", {"layer": LAYERS}), ("layer", {"layer": MAX32}), ("kind", {"kind": "x"}),
                            ("kind", {"kind": ""}), ("head_end", {"head_end": 0}), ("head_end", {"head_end": MAX32}),
                            ("head_end", {"head_begin": 2, "head_end": 1}), ("token_end", {"token_end": 0}),
                            ("token_end", {"token_end": len(PROMPT) + 1}), ("token_end", {"token_end": MAX32}))],
    BadCall("KvSource.Read too many ranges", read_many_ranges, field="ranges"),
    BadCall("KvSource.Read chunks of a byte", lambda s: ask("Read", s, max_chunk_bytes=1), field="max_chunk_bytes"),
    BadCall("KvSource.Read garbage", read_bytes(b"\xff" * 40), words="ReadRequest"),
    *[BadCall(f"Generate source {list(change.items())[0]}"[:60], lambda s, c=change: pull(s, change=c), field=field)
      for field, change in REFERENCES],
    BadCall("Generate source elsewhere", lambda s: pull(s, change={"address": "192.0.2.7:7000"}),
            Code.PERMISSION_DENIED, reason="SOURCE_NOT_ALLOWED", words="pull_from"),
    BadCall("Generate source by a name elsewhere", lambda s: pull(s, change={"address": "localhost.example:7000"}),
            Code.PERMISSION_DENIED, reason="SOURCE_NOT_ALLOWED", words="pull_from"),
    BadCall("Generate source without its prompt", lambda s: pull(s, prompt=[]), field="prompt_token_ids"),
    BadCall("Generate source of another prompt", lambda s: pull(s, prompt=[1, *PROMPT[1:]]), field="prompt_token_ids"),
    BadCall("Generate source of another prompt, undigested",
            lambda s: pull(s, prompt=[1, *PROMPT[1:]], change={"prompt_digest": ""}),
            Code.FAILED_PRECONDITION, reason="SOURCE_MISMATCH"),
    BadCall("Generate source of a longer prompt", lambda s: pull(s, prompt=[*PROMPT, 5], change={"prompt_digest": ""}),
            Code.FAILED_PRECONDITION, reason="SOURCE_MISMATCH"),
    BadCall("Generate source and a prompt beyond the context",
            lambda s: pull(s, prompt=[5] * (CONTEXT + 1), change={"prompt_digest": ""}), field="prompt_token_ids"),
    BadCall("Generate source of another model", lambda s: pull(s, change={"model_fingerprint": "0" * 64}),
            Code.FAILED_PRECONDITION, reason="FINGERPRINT_MISMATCH"),
    BadCall("Generate source and more output than context", lambda s: pull(s, settings={"max_tokens": CONTEXT}),
            field="sampling.max_tokens"),
    BadCall("Generate source of another tenant", lambda s: pull(s, tenant="b"), **NO_SOURCE),
    BadCall("Generate source that was released", lambda s: pull(s, of=released), **NO_SOURCE),
    BadCall("Generate source that never was", lambda s: pull(s, change={"source_id": UNKNOWN_ID}), **NO_SOURCE),
    BadCall("Generate source where nobody is", lambda s: pull(s, change={"address": "127.0.0.1:1"}),
            Code.UNAVAILABLE, reason="SOURCE_UNREACHABLE", words="127.0.0.1:1"),
    BadCall("Generate source at a node that holds nothing", lambda s: pull(s, change={"address": lambda s: s.node.address}),
            Code.UNAVAILABLE, reason="SOURCE_UNREACHABLE"),
]
