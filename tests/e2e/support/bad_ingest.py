"""Bad calls of KvIngest."""

import math
from typing import Callable

import grpc
from google.protobuf import duration_pb2
from sluice.v1 import common_pb2, decode_pb2, ingest_pb2
from support.bad_calls import CONTEXT, HEADS, LAYERS, MAX32, NOT_THERE, UNKNOWN_ID, VOCABULARY, BadCall, Site
from support.nodes import TIMEOUT_S, greedy
from support.transfers import Part, Transfer

Code = grpc.StatusCode
NAN = math.nan


def changed(change: Callable[[ingest_pb2.Manifest], object]):
    """Returns a Reserve with a manifest that `change` altered."""
    def call(site: Site):
        transfer = site.transfer(reserve=False)
        change(transfer.request.manifest)
        return transfer.reserve()
    return call


def manifest_with(**fields):
    def change(manifest):
        for name, value in fields.items():
            setattr(manifest, name, value)
    return changed(change)


def kind_with(**fields):
    return changed(lambda m: [setattr(m.cache_kinds[0], k, v) for k, v in fields.items()])


def parts_of(*part_bytes: int, **fields):
    """Gives a block other parts than K and V."""
    def change(manifest):
        kind = manifest.cache_kinds[0]
        kind.part_bytes[:] = part_bytes
        kind.bytes_per_token = fields.get("bytes_per_token", sum(part_bytes))
    return changed(change)


def lease(seconds: int, nanos: int = 0):
    return lambda site: site.transfer(lease=duration_pb2.Duration(seconds=seconds, nanos=nanos))


def same_key(site: Site):
    site.transfer(rendezvous_key="taken")
    return site.transfer(rendezvous_key="taken")


def full(site: Site):
    """Reserves 2.4 MB at a time until the 6 MiB of DRAM have no room."""
    while True:
        transfer = site.transfer(reserve=False)
        transfer.request.manifest.prompt_token_ids.extend([5] * 1500)
        transfer.request.manifest.context_length = 1533
        transfer.reserve()


def reserve_cases() -> list[BadCall]:
    prompt, kinds = "manifest.prompt_token_ids", "manifest.cache_kinds"
    return [
        BadCall("Reserve nothing", lambda s: s.node.ingest.Reserve(ingest_pb2.ReserveRequest(), timeout=TIMEOUT_S),
                field="manifest"),
        BadCall("Reserve no prompt", changed(lambda m: m.ClearField("prompt_token_ids")), field=prompt),
        BadCall("Reserve a token outside", changed(lambda m: m.prompt_token_ids.__setitem__(3, VOCABULARY)),
                field=prompt),
        BadCall("Reserve token 2^32 - 1", changed(lambda m: m.prompt_token_ids.__setitem__(32, MAX32)), field=prompt),
        BadCall("Reserve a prompt over the context", changed(lambda m: m.prompt_token_ids.extend([5] * CONTEXT)),
                field=prompt),
        *[BadCall(f"Reserve context_length {v}", manifest_with(context_length=v), field="manifest.context_length")
          for v in (0, 34, MAX32)],
        *[BadCall(f"Reserve max_new_tokens {v}", manifest_with(max_new_tokens=v), field="manifest.max_new_tokens")
          for v in (0, CONTEXT, 2**31, MAX32)],
        BadCall("Reserve long tenant", manifest_with(tenant="x" * 129), field="manifest.tenant"),
        BadCall("Reserve long fingerprint", manifest_with(model_fingerprint="f" * 129),
                field="manifest.model_fingerprint"),
        *[BadCall(f"Reserve fingerprint {v[:4]!r}", manifest_with(model_fingerprint=v), Code.FAILED_PRECONDITION,
                  reason="FINGERPRINT_MISMATCH", words="manifest.model_fingerprint")
          for v in ("", "0" * 64, "not hexadecimal")],
        *[BadCall(f"Reserve kind {k} {v}", kind_with(**{k: v}), field=kinds)
          for k, v in (("name", "latent"), ("name", ""), ("block_tokens", 16), ("heads", 1),
                       ("element_type", common_pb2.ELEMENT_TYPE_FLOAT32),
                       ("element_type", common_pb2.ELEMENT_TYPE_FLOAT8_E4M3))],
        *[BadCall(f"Reserve parts {list(v)}", parts_of(*v), field=kinds)
          for v in ((256,), (128, 64, 64), (192, 64), (128, 4), (656,), (256, 256))],
        *[BadCall(f"Reserve parts {list(v[:9])} of {b}", parts_of(*v, bytes_per_token=b),
                  field=f"{kinds}[0].part_bytes")
          for v, b in (((), 256), ((128, 0, 128), 256), ((1,) * 9, 9), ((128, 127), 256), ((2**63, 2**63), 256),
                       ((2**64 - 1, 257), 256))],
        *[BadCall(f"Reserve kind {k} {v}", kind_with(**{k: v}), field=f"{kinds}[0].{k}")
          for k, v in (("heads", 0), ("heads", MAX32), ("block_tokens", 0),
                       ("bytes_per_token", 0), ("bytes_per_token", 2**64 - 1), ("name", "x" * 129),
                       ("element_type", 0), ("element_type", 77), ("element_type", -1))],
        BadCall("Reserve two kinds", changed(lambda m: m.cache_kinds.append(m.cache_kinds[0])), field=kinds),
        BadCall("Reserve nine kinds", changed(lambda m: m.cache_kinds.extend([m.cache_kinds[0]] * 8)), field=kinds),
        BadCall("Reserve long key", lambda s: s.transfer(rendezvous_key="x" * 129), field="rendezvous_key"),
        *[BadCall(f"Reserve lease {v}", lease(*v), field="lease")
          for v in ((0, 0), (-1, 0), (0, -1), (1, -1), (0, 10**9), (0, -2**31), (2**63 - 1, 0), (-2**63, 0),
                    (3601, 0), (3600, 1))],  # longer than the node's own lease
        BadCall("Reserve a key in use", same_key, Code.ALREADY_EXISTS, reason="RENDEZVOUS_KEY_IN_USE"),
        BadCall("Reserve what never fits", changed(lambda m: m.prompt_token_ids.extend([5] * 2900)),
                field="manifest", words="--hbm-bytes"),
        BadCall("Reserve what does not fit now", full, Code.RESOURCE_EXHAUSTED, reason="DRAM_FULL"),
    ]


# A chunk of layer 1, head 0, tokens 0-32 of 33. Each case below changes one thing about it.
GOOD = Part(1, (0, 1), (0, 32))
HEAD_RANGE, TOKEN_RANGE = "header.head_begin, header.head_end", "header.token_begin, header.token_end"
CHUNKS = [
    *[("header.layer", {"layer": v}) for v in (LAYERS, MAX32, 2**32, 2**63)],
    *[("header.kind", {"kind": v}) for v in ("latent", "", "KV", "kv ", "k" * 200)],
    *[(HEAD_RANGE, dict(zip(("head_begin", "head_end"), v))) for v in (
        (1, 1), (1, 0), (2, 3), (0, HEADS + 1), (MAX32, 0), (0, MAX32), (MAX32 - 1, MAX32))],
    *[("header.head_begin", {"head_begin": v}) for v in (2**32, 2**63)],
    *[("header.head_end", {"head_end": v}) for v in (2**32 + 1, 2**64 - 1)],
    *[(TOKEN_RANGE, dict(zip(("token_begin", "token_end"), v))) for v in (
        (32, 32), (32, 0), (0, 64), (64, 96), (0, MAX32), (2**32 - 32, MAX32))],
    *[("header.token_begin", {"token_begin": v}) for v in (1, 31, 2**32, 2**63, 2**64 - 32)],
    *[("header.token_end", {"token_end": v}) for v in (1, 31, 2**32 + 32, 2**63 + 32)],
    *[("payload", {"payload": bytes(v)}) for v in (0, 1, 8191, 8193, 16384)],
]


def shown(wrong: dict) -> str:
    return ", ".join(f"{k} of {len(v)} bytes" if k == "payload" else f"{k} {v!r:.16}" for k, v in wrong.items())


def write(site: Site, **wrong):
    transfer = site.transfer()
    try:
        return transfer.write(transfer.message(GOOD, **wrong))
    finally:
        assert transfer.status().blocks_landed == 0


def over_the_limit(site: Site):
    transfer = site.transfer(reserve=False)
    return transfer.write(transfer.message(GOOD, transfer_id=UNKNOWN_ID,
                                           payload=bytes(transfer.reserve().max_chunk_bytes + (64 << 10) + 1)))


def committed_write(site: Site):
    transfer = site.committed()
    return transfer.write(transfer.message(transfer.parts()[0]))


def poisoned(then: Callable[[Transfer], object]):
    def call(site: Site):
        transfer = site.transfer()
        good = transfer.message(GOOD)
        transfer.write(good)
        try:
            transfer.write(transfer.message(GOOD, payload=bytes(len(good.payload))))
        except grpc.RpcError:
            return then(transfer)
        raise AssertionError("other bytes for a landed block were taken")
    return call


def other_bytes(site: Site):
    transfer = site.transfer()
    good = transfer.message(GOOD)
    transfer.write(good)
    return transfer.write(transfer.message(GOOD, payload=bytes(len(good.payload))))


def ingest_cases() -> list[BadCall]:
    def commit(*tokens, **settings):
        """Returns a Commit with these first tokens, to a transfer that lacks nothing else."""
        def call(site: Site):
            transfer = site.transfer(0, **settings)
            transfer.write_all()
            return site.node.ingest.Commit(ingest_pb2.CommitRequest(
                transfer_id=transfer.id, first_tokens=tokens), timeout=TIMEOUT_S)
        return call

    def hints(unit_tokens=1, **entry):
        """Returns a Commit with hints, of which the second entry is wrong."""
        def call(site: Site):
            transfer = site.transfer(0)
            transfer.write_all()
            entries = [ingest_pb2.Hints.Entry(layer=0, units=[0]), ingest_pb2.Hints.Entry(**entry)]
            return site.node.ingest.Commit(ingest_pb2.CommitRequest(
                transfer_id=transfer.id, hints=ingest_pb2.Hints(unit_tokens=unit_tokens, entries=entries)),
                timeout=TIMEOUT_S)
        return call

    def hinted_queries(v):
        def call(site: Site):
            transfer = site.transfer(0)
            transfer.write_all()
            return site.node.ingest.Commit(ingest_pb2.CommitRequest(
                transfer_id=transfer.id, hints=ingest_pb2.Hints(queries=v)), timeout=TIMEOUT_S)
        return call

    def commit_id(v):
        return lambda s: s.node.ingest.Commit(ingest_pb2.CommitRequest(transfer_id=v), timeout=TIMEOUT_S)

    def get(v):
        return lambda s: s.node.ingest.GetTransfer(ingest_pb2.GetTransferRequest(transfer_id=v), timeout=TIMEOUT_S)

    token, top = common_pb2.Token, common_pb2.TokenLogprob
    return [
        *[BadCall(f"Write {shown(wrong)}", lambda s, w=wrong: write(s, **w), field=field)
          for field, wrong in CHUNKS],
        BadCall("Write a damaged chunk", lambda s: write(s, crc32c=1), Code.DATA_LOSS, reason="CHECKSUM_MISMATCH",
                words="layer 1"),
        BadCall("Write over the limit", over_the_limit, Code.RESOURCE_EXHAUSTED, words="larger than max"),
        *[BadCall(f"Write to {v[:8]!r}", lambda s, v=v: write(s, transfer_id=v), **NOT_THERE)
          for v in (UNKNOWN_ID, "", "x" * 2000)],
        BadCall("Write after Commit", committed_write, Code.FAILED_PRECONDITION, reason="COMMITTED"),
        BadCall("Write other bytes", other_bytes, Code.FAILED_PRECONDITION, reason="POISONED"),
        BadCall("Write to a poisoned transfer", poisoned(lambda t: t.write(t.message(t.parts()[0]))),
                Code.FAILED_PRECONDITION, reason="POISONED"),
        BadCall("Commit a poisoned transfer", poisoned(lambda t: t.commit()), Code.FAILED_PRECONDITION,
                reason="POISONED"),
        BadCall("Generate on a poisoned transfer", poisoned(lambda t: list(t.node.decode.Generate(
            decode_pb2.GenerateRequest(transfer_id=t.id, sampling=greedy()), timeout=TIMEOUT_S))),
            Code.FAILED_PRECONDITION, reason="POISONED"),
        BadCall("Commit with blocks missing", lambda s: s.transfer().commit(), Code.FAILED_PRECONDITION,
                reason="MISSING_BLOCKS", words="layer 0"),
        *[BadCall(f"Commit {v[:8]!r}", commit_id(v), **NOT_THERE) for v in (UNKNOWN_ID, "", "x" * 2000)],
        *[BadCall(f"GetTransfer {v[:8]!r}", get(v), **NOT_THERE) for v in (UNKNOWN_ID, "", "x" * 2000)],
        BadCall("Abort for a long reason", lambda s: s.node.ingest.Abort(ingest_pb2.AbortRequest(
            transfer_id=UNKNOWN_ID, reason="x" * 1025), timeout=TIMEOUT_S), field="reason"),
        *[BadCall(f"Commit first token {v}", commit(token(id=v)), field="first_tokens[0].id")
          for v in (VOCABULARY, MAX32)],
        *[BadCall(f"Commit hints of units of {v}", hints(v, units=[1]), field="hints.unit_tokens") for v in (0, 3, MAX32)],
        *[BadCall(f"Commit a hint of layer {v}", hints(layer=v), field="hints.entries[1].layer") for v in (LAYERS, MAX32)],
        BadCall("Commit a hint of no head", hints(kv_head=HEADS), field="hints.entries[1].kv_head"),
        BadCall("Commit a hint of no row", hints(position=CONTEXT), field="hints.entries[1].position"),
        BadCall("Commit a hint past the end", hints(units=[0, CONTEXT]), field="hints.entries[1].units[1]"),
        BadCall("Commit a hint twice", hints(units=[0, 0]), field="hints.entries[1].units[1]"),
        BadCall("Commit half a query", hinted_queries(b"123"), field="hints.queries"),
        BadCall("Commit second token", commit(token(id=1), token(id=VOCABULARY)), field="first_tokens[1].id"),
        BadCall("Commit logprob NaN", commit(token(id=1, logprob=NAN)), field="first_tokens[0].logprob"),
        BadCall("Commit 21 alternatives", commit(token(id=1, top_logprobs=[top(token_id=1)] * 21)),
                field="first_tokens[0].top_logprobs"),
        BadCall("Commit an alternative outside", commit(token(id=1, top_logprobs=[top(token_id=VOCABULARY)])),
                field="first_tokens[0].top_logprobs[0].token_id"),
        BadCall("Commit an alternative's NaN", commit(token(id=1, top_logprobs=[top(logprob=NAN)])),
                field="first_tokens[0].top_logprobs[0].logprob"),
        BadCall("Commit 17 first tokens", commit(*[token(id=1)] * 17), field="first_tokens"),
        BadCall("Commit more than max_new_tokens", commit(*[token(id=1)] * 3, max_new_tokens=2), field="first_tokens"),
    ]


INGEST_CALLS = reserve_cases() + ingest_cases()
