"""Makes transfers of golden caches by hand, chunk by chunk, right or wrong."""

from dataclasses import dataclass

import google_crc32c
from sluice.v1 import admin_pb2, common_pb2, ingest_pb2
from sluice_client import latent, layout
from sluice_client.pusher import Pusher
from support.nodes import TIMEOUT_S, Golden, Node


@dataclass(frozen=True)
class Part:
    """A chunk of the golden cache: one layer, some heads, some tokens, of a kind or the first kind."""

    layer: int
    heads: tuple[int, int]
    tokens: tuple[int, int]
    kind: str = ""


class Transfer:
    """A golden case as a transfer into `node`."""

    def __init__(self, node: Node, golden: Golden, case: int = 1, max_new_tokens: int = 24, *,
                 reserve: bool = True, **request):
        self.node, self.golden, self.case = node, golden, case
        self.model = node.admin.GetModel(admin_pb2.GetModelRequest(), timeout=TIMEOUT_S).model
        self.kind = self.model.cache_kinds[0]
        self.prompt = golden.prompt(case)
        self.id = ""
        self.manifest = ingest_pb2.Manifest(
            model_fingerprint=self.model.fingerprint, cache_kinds=self.model.cache_kinds,
            context_length=len(self.prompt), prompt_token_ids=self.prompt, max_new_tokens=max_new_tokens)
        self.request = ingest_pb2.ReserveRequest(manifest=self.manifest, **request)
        if reserve:
            self.reserve()

    def reserve(self) -> ingest_pb2.ReserveResponse:
        answer = self.node.ingest.Reserve(self.request, timeout=TIMEOUT_S)
        self.id = answer.transfer_id
        return answer

    def parts(self) -> list[Part]:
        """Returns the whole cache: each layer, each kind, each block, each head by itself."""
        return [Part(layer, (head, head + 1), (begin, min(begin + kind.block_tokens, len(self.prompt))), kind.name)
                for layer in range(self.model.layers) for kind in self.model.cache_kinds for head in range(kind.heads)
                for begin in range(0, len(self.prompt), kind.block_tokens)]

    def _payload(self, kind: common_pb2.CacheKind, part: Part) -> bytes:
        def rows(name):
            return self.golden.file[f"case{self.case}.{name}.{part.layer}"][part.tokens[0]:part.tokens[1]]

        if kind.name == "latent":
            return layout.pack(kind, latent.entry_parts(kind, rows("latent"), rows("rope")))
        if kind.name == "index":
            return layout.pack(kind, latent.index_parts(kind, rows("index")))
        return layout.pack(kind, layout.kv_parts(kind, *(rows(p)[:, part.heads[0]:part.heads[1]] for p in "kv")))

    def message(self, part: Part, **wrong) -> ingest_pb2.WriteRequest:
        """Returns the chunk of `part`; `wrong` overrides fields of its header, or its payload."""
        kind = next(k for k in self.model.cache_kinds if part.kind in ("", k.name))
        payload = wrong.pop("payload", None)
        if payload is None:
            payload = self._payload(kind, part)
        header = ingest_pb2.ChunkHeader(
            transfer_id=self.id, layer=part.layer, kind=kind.name, head_begin=part.heads[0],
            head_end=part.heads[1], token_begin=part.tokens[0], token_end=part.tokens[1],
            crc32c=google_crc32c.value(payload))
        for name, value in wrong.items():
            setattr(header, name, value)
        return ingest_pb2.WriteRequest(header=header, payload=payload)

    def write(self, *messages: ingest_pb2.WriteRequest) -> ingest_pb2.WriteResponse:
        return self.node.ingest.Write(iter(messages), timeout=TIMEOUT_S)

    def write_all(self) -> None:
        self.write(*(self.message(p) for p in self.parts()))

    def commit(self, first_tokens=()) -> ingest_pb2.CommitResponse:
        return self.node.ingest.Commit(ingest_pb2.CommitRequest(
            transfer_id=self.id, first_tokens=[common_pb2.Token(id=t) for t in first_tokens]),
            timeout=TIMEOUT_S)

    def status(self) -> ingest_pb2.GetTransferResponse:
        return self.node.ingest.GetTransfer(ingest_pb2.GetTransferRequest(transfer_id=self.id),
                                            timeout=TIMEOUT_S)

    def abort(self) -> None:
        self.node.ingest.Abort(ingest_pb2.AbortRequest(transfer_id=self.id, reason="test"),
                               timeout=TIMEOUT_S)


def committed(node: Node, golden: Golden, case: int = 1, max_new_tokens: int = 24, *,
              prompt: list[int] | None = None, context_length: int | None = None, **kwargs) -> str:
    """Makes a transfer that is ready to decode and returns its id.

    `prompt` is the case's prompt and the tokens that follow; `context_length` is how much of the case's cache is sent.
    """
    sent = context_length or len(golden.prompt(case))
    with Pusher(node.address) as pusher:
        pusher.reserve(prompt or golden.prompt(case), sent, max_new_tokens)
        latents = pusher.model.cache_kinds[0].name == "latent"
        write, names = (pusher.write_latent_layer, ("latent", "rope", "index")) if latents else (pusher.write_layer, "kv")
        for number in range(pusher.model.layers):
            write(number, *(golden.file[f"case{case}.{name}.{number}"][:sent] for name in names))
        return pusher.commit(**kwargs)
