"""Pushes the KV caches of a prompt into a decode node, for prefill nodes written in Python.

    with Pusher("127.0.0.1:7000") as pusher:
        pusher.reserve(prompt_ids, max_new_tokens=256)
        for layer in range(layers):
            k, v = compute(layer)                # [tokens, kv_heads, head_dim], K after RoPE
            pusher.write_layer(layer, k, v)      # goes out while the next layer is computed
        transfer_id = pusher.commit(first_tokens=[token])

A model with latent attention has write_latent_layer() in place of write_layer().

An exception in the block aborts the transfer. The chunks of a stream that breaks, and chunks that arrive damaged,
are sent again. So the arrays that write_layer gets must not change before commit() returns; callables that make
the arrays again may be given instead.

One thread uses a Pusher; its streams have threads of their own.
"""

import time
from typing import Callable, Iterable

import grpc
import numpy as np

from sluice.v1 import admin_pb2, admin_pb2_grpc, common_pb2, ingest_pb2, ingest_pb2_grpc
from sluice_client import latent as latent_form
from sluice_client import layout, rpc
from sluice_client.push_streams import MAX_RESUMES, Chunk, PushError, PushStream, pause_s, resumable

# Payload of one message: large enough that a message costs little, small enough to overlap.
_CHUNK_BYTES = 1 << 20
_CALL_TIMEOUT_S = 30.0

Array = np.ndarray | Callable[[], np.ndarray]


def _made(arrays: tuple[Array, ...]) -> list[np.ndarray]:
    """Returns the arrays, which callables make."""
    return [a() if callable(a) else a for a in arrays]


class Pusher:
    """A transfer into the decode node at `decode_address`."""

    def __init__(self, decode_address: str, streams: int = 2, model: common_pb2.ModelInfo | None = None):
        """Asks the node for its model, unless that is given. Raises PushError if the node does not answer."""
        self.address = decode_address
        self._channel = rpc.open_channel(decode_address)
        self._ingest = ingest_pb2_grpc.KvIngestStub(self._channel)
        self._stream_count = streams
        self._streams: dict[str, list[PushStream]] = {}  # by address
        self._next = 0
        self.rank_ports: list[ingest_pb2.RankPort] = []  # of ranks that take some heads themselves
        self._chunks: list[Chunk] = []
        self.max_chunk_bytes = _CHUNK_BYTES
        self.transfer_id = ""
        self.context_length = 0
        self.cached_tokens = 0  # leading tokens that the node has already; they are not sent
        self.lease_seconds = 0.0
        admin = admin_pb2_grpc.AdminStub(self._channel)
        self.model = model or self._call(admin.GetModel, admin_pb2.GetModelRequest()).model
        self.kinds = {kind.name: kind for kind in self.model.cache_kinds}

    def reserve(self, prompt_ids: list[int], context_length: int | None = None,
                max_new_tokens: int = 256, *, fingerprint: str | None = None, tenant: str = "",
                rendezvous_key: str = "", lease_seconds: float | None = None) -> str:
        """Opens the transfer; returns its id.

        The node may have the caches of leading tokens from an earlier prompt; `cached_tokens` says of how many, and
        what is written for them is not sent.

        The caches of the first `context_length` of `prompt_ids` will be sent (default: all). `fingerprint` is that of
        the model that made the caches; None trusts that it is the node's model.
        """
        if context_length is None:
            context_length = len(prompt_ids)
        request = ingest_pb2.ReserveRequest(
            manifest=ingest_pb2.Manifest(
                model_fingerprint=fingerprint or self.model.fingerprint,
                cache_kinds=self.model.cache_kinds, context_length=context_length,
                prompt_token_ids=prompt_ids, max_new_tokens=max_new_tokens, tenant=tenant),
            rendezvous_key=rendezvous_key)
        if lease_seconds is not None:
            request.lease.FromNanoseconds(int(lease_seconds * 1e9))
        answer = self._call(self._ingest.Reserve, request)
        self.transfer_id = answer.transfer_id
        self.context_length = context_length
        self.max_chunk_bytes = min(_CHUNK_BYTES, answer.max_chunk_bytes or _CHUNK_BYTES)
        self.cached_tokens = answer.cached_tokens
        self.lease_seconds = answer.lease.ToNanoseconds() * 1e-9
        self.hint_tokens = answer.hint_tokens
        self.hint_queries = answer.hint_queries
        self.rank_ports = list(answer.rank_ports)
        return self.transfer_id

    def attach(self, transfer_id: str, context_length: int, max_chunk_bytes: int = 0,
               cached_tokens: int = 0, rank_ports: Iterable[ingest_pb2.RankPort] = ()) -> None:
        """Sends into a transfer that another process has reserved and commits, as each rank of a prefill node does.

        settle() then stands in place of commit(). `max_chunk_bytes`, `cached_tokens` and `rank_ports` are those of the
        reservation; 0: the default, and none.
        """
        self.transfer_id = transfer_id
        self.context_length = context_length
        self.max_chunk_bytes = min(_CHUNK_BYTES, max_chunk_bytes or _CHUNK_BYTES)
        self.cached_tokens = cached_tokens
        self.rank_ports = list(rank_ports)

    def settle(self) -> None:
        """Waits until all chunks that were written here have landed, and sends lost ones again; then detaches."""
        for attempt in range(MAX_RESUMES):
            self._finish_streams()
            missing = self.transfer().missing.ranges
            again = [c for c in self._chunks if any(c.meets(r) for r in missing)]
            if not again:
                self.transfer_id = ""
                self._chunks.clear()
                return
            time.sleep(pause_s(attempt))
            for chunk in again:
                self._post(chunk)
        raise PushError(f"{self.address}: {len(again)} chunks have not landed after {MAX_RESUMES} attempts")

    def abandon(self) -> None:
        """Stops sending at once and detaches. The transfer itself goes on, or ends by another's abort or its lease."""
        for stream in self._open_streams():
            stream.abandon()
        self._streams.clear()
        self._chunks.clear()
        self.transfer_id = ""

    def write_layer(self, layer: int, k: Array, v: Array, token_begin: int = 0,
                    head_begin: int = 0, kind: str = "kv") -> None:
        """Sends K (after RoPE) and V of one layer, [tokens, heads, head_dim], float32 or bfloat16.

        `token_begin` begins a block, and the tokens end on a block or at the end of the context. A tensor-parallel
        node may give only its own heads, from `head_begin` on. Callables are called now, and again if a chunk has to
        be sent again.
        """
        cache_kind = self._kind(kind)
        arrays = _made((k, v))
        shape = arrays[0].shape
        if arrays[1].shape != shape or len(shape) != 3:
            raise PushError(f"layer {layer}: K is {shape} and V {arrays[1].shape}; expected two "
                            "arrays [tokens, heads, head_dim] of one shape")
        tokens, heads, dim = shape
        if list(cache_kind.part_bytes) != [dim * layout.dtype_of(cache_kind).itemsize] * 2 or \
                layout.is_packed(cache_kind) or head_begin + heads > cache_kind.heads:
            raise PushError(f"layer {layer}: arrays of {heads} heads from head {head_begin} with "
                            f"head_dim {dim} do not fit the node's cache: {cache_kind.heads} heads, "
                            f"{cache_kind.bytes_per_token} bytes per token and head")
        self._write(layer, cache_kind, (k, v), arrays, layout.kv_parts, tokens,
                    (head_begin, head_begin + heads), token_begin)

    def write_latent_layer(self, layer: int, latent: Array, rope: Array, index: Array | None = None,
                           token_begin: int = 0) -> None:
        """Sends one layer of a model with latent attention, in the form that the node keeps.

        `latent` is [tokens, rank] after kv_a_layernorm. `rope` is [tokens, rope] after RoPE, in interleaved pairs.
        `index` is [tokens, 128], the indexer's keys after k_norm and RoPE and before any Hadamard transform, or None
        where the model has no indexer. All are float32 or bfloat16. The rest is as in write_layer.
        """
        kinds = [("latent", (latent, rope), latent_form.entry_parts)]
        if index is not None:
            kinds.append(("index", (index,), latent_form.index_parts))
        if len(kinds) != len(self.kinds):
            raise PushError(f"layer {layer}: the node keeps {', '.join(self.kinds)}, "
                            f"given {', '.join(name for name, _, _ in kinds)}")
        for name, sources, to_parts in kinds:
            cache_kind = self._kind(name)
            arrays = _made(sources)
            tokens = arrays[0].shape[0]
            if any(a.ndim != 2 or a.shape[0] != tokens for a in arrays):
                raise PushError(f"layer {layer}: {name} is {[a.shape for a in arrays]}; expected arrays "
                                "[tokens, dim] of as many tokens")
            try:
                found = [part.shape[2] for part in to_parts(cache_kind, *(a[:1] for a in arrays))]
            except ValueError as error:
                raise PushError(f"layer {layer}: {name} is {[a.shape for a in arrays]}: {error}") from error
            if found != list(cache_kind.part_bytes):
                raise PushError(f"layer {layer}: {name} of {[a.shape for a in arrays]} has {found} bytes a "
                                f"token, the node's cache {list(cache_kind.part_bytes)}: expected latent "
                                "[tokens, kv_lora_rank], rope [tokens, qk_rope_head_dim] and index "
                                "[tokens, index_head_dim] of the node's model")
            self._write(layer, cache_kind, sources, arrays, to_parts, tokens, (0, 1), token_begin)

    def write_chunk(self, layer: int, kind: str, heads: tuple[int, int], tokens: tuple[int, int],
                    payload: bytes | Callable[[], bytes]) -> None:
        """Sends one chunk of any cache kind in the layout of the host KV cache. The ranges are half open."""
        self._send(Chunk(layer, kind, heads, tokens,
                          payload if callable(payload) else lambda: payload))

    def chunk_tokens(self, kind: common_pb2.CacheKind, heads: int) -> int:
        """Returns how many tokens a chunk of so many heads has: whole blocks, at least one."""
        blocks = self.max_chunk_bytes // layout.payload_bytes(kind, heads, kind.block_tokens)
        return max(1, blocks) * kind.block_tokens

    def head_parts(self, heads: tuple[int, int]) -> list[tuple[int, int]]:
        """Cuts a range of heads so that each part goes to one address."""
        edges = {edge for port in self.rank_ports for edge in (port.head_begin, port.head_end)}
        cuts = [heads[0], *sorted(edge for edge in edges if heads[0] < edge < heads[1]), heads[1]]
        return list(zip(cuts, cuts[1:]))

    def commit(self, first_tokens: list[int | common_pb2.Token] = (),
               hints: ingest_pb2.Hints | None = None) -> str:
        """Waits until all chunks have landed, sends missing ones again, commits; returns the transfer id.

        `hints` are the blocks that the sequence should begin with in HBM, with at most `hint_tokens` tokens of each
        entry.
        """
        request = ingest_pb2.CommitRequest(transfer_id=self.transfer_id, hints=hints)
        for token in first_tokens:
            request.first_tokens.append(
                token if isinstance(token, common_pb2.Token) else common_pb2.Token(id=token))
        for attempt in range(MAX_RESUMES):
            self._finish_streams()
            try:
                self._ingest.Commit(request, timeout=_CALL_TIMEOUT_S)
                transfer_id, self.transfer_id = self.transfer_id, ""
                self._chunks.clear()
                return transfer_id
            except grpc.RpcError as error:
                # Commit is idempotent: a broken connection may have lost only the answer.
                if resumable(error):
                    last = error
                    time.sleep(pause_s(attempt))
                    continue
                if "MissingBlocks" not in rpc.details_of(error) or not self._send_missing(error):
                    raise PushError(rpc.explain(error, self.address), error) from error
                last = error
        raise PushError(f"{rpc.explain(last, self.address)} (after {MAX_RESUMES} attempts)", last)

    def renew(self) -> None:
        """Starts the transfer's lease anew, which writes do by themselves. Only while blocks are known to be missing:
        it is a commit, which finds them missing.
        """
        try:
            self._ingest.Commit(ingest_pb2.CommitRequest(transfer_id=self.transfer_id), timeout=_CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            if "MissingBlocks" not in rpc.details_of(error):
                raise PushError(rpc.explain(error, self.address), error) from error

    def transfer(self) -> ingest_pb2.GetTransferResponse:
        """Returns which blocks have landed."""
        return self._call(self._ingest.GetTransfer,
                          ingest_pb2.GetTransferRequest(transfer_id=self.transfer_id))

    def abort(self, reason: str = "aborted by the prefill node") -> None:
        """Gives the transfer up and its memory back. It does nothing after commit()."""
        transfer_id = self.transfer_id
        self.abandon()
        if transfer_id:
            self._call(self._ingest.Abort, ingest_pb2.AbortRequest(transfer_id=transfer_id, reason=reason[:256]))

    def close(self) -> None:
        """Closes the connection. A transfer that is still open ends with its lease."""
        self._channel.close()

    def __enter__(self) -> "Pusher":
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            if self.transfer_id:
                self.abort(f"{kind.__name__}: {error}" if kind else "left without commit")
        except PushError:
            if kind is None:
                raise
        finally:
            self.close()

    def _write(self, layer: int, kind: common_pb2.CacheKind, sources: tuple[Array, ...],
               arrays: list[np.ndarray] | None, to_parts: Callable[..., list[np.ndarray]], tokens: int,
               heads: tuple[int, int], token_begin: int) -> None:
        """Sends the arrays of `sources`, cut into chunks."""
        if any(callable(a) for a in sources):
            arrays = None  # The callables make them again, so that nothing is kept.
        known = self.cached_tokens // kind.block_tokens * kind.block_tokens
        for part in self.head_parts(heads):
            own = slice(part[0] - heads[0], part[1] - heads[0])
            step = self.chunk_tokens(kind, part[1] - part[0])
            for begin in range(max(0, known - token_begin), tokens, step):
                end = min(begin + step, tokens)

                def payload(begin=begin, end=end, own=own, arrays=arrays):
                    parts = to_parts(kind, *(a[begin:end] for a in arrays or _made(sources)))
                    return layout.pack(kind, [p[:, own] for p in parts])

                self._send(Chunk(layer, kind.name, part, (token_begin + begin, token_begin + end), payload))

    def _kind(self, name: str) -> common_pb2.CacheKind:
        if name not in self.kinds:
            raise PushError(f"the node's model has no cache kind '{name}': it has "
                            f"{', '.join(self.kinds)}")
        return self.kinds[name]

    def _send(self, chunk: Chunk) -> None:
        if not self.transfer_id:
            raise PushError("reserve() comes before anything is written")
        if chunk.tokens[1] <= self.cached_tokens:
            return
        self._chunks.append(chunk)
        self._post(chunk)

    def _post(self, chunk: Chunk) -> None:
        address = self._address_of(chunk.heads)
        streams = self._streams.setdefault(address, [])
        self._note_lost(address, streams)
        if len(streams) < self._stream_count:
            streams.append(PushStream(address, self.transfer_id, self.address if address != self.address else ""))
        self._next += 1
        streams[self._next % len(streams)].put(chunk)

    def _note_lost(self, address: str, streams: list[PushStream]) -> None:
        """Sends nothing more to a rank's port that failed. What was sent there and did not land comes again."""
        if any(stream.left_rank for stream in streams):
            self.rank_ports = [port for port in self.rank_ports if port.address != address]

    def _address_of(self, heads: tuple[int, int]) -> str:
        """Returns the port of the rank that has all of these heads, or the node's own address."""
        return next((port.address for port in self.rank_ports
                     if port.head_begin <= heads[0] and heads[1] <= port.head_end), self.address)

    def _open_streams(self) -> list[PushStream]:
        return [stream for streams in self._streams.values() for stream in streams]

    def _finish_streams(self) -> None:
        streams, self._streams = self._streams, {}
        for address, those in streams.items():
            for stream in those:
                stream.finish()
            self._note_lost(address, those)

    def _send_missing(self, error: grpc.RpcError) -> bool:
        """Posts every kept chunk that meets a missing range. Returns whether every range meets one."""
        ranges = list(rpc.details_of(error)["MissingBlocks"].ranges) + list(
            self.transfer().missing.ranges)
        again = [c for c in self._chunks if any(c.meets(r) for r in ranges)]
        if not ranges or any(not any(c.meets(r) for c in again) for r in ranges):
            return False
        for chunk in again:
            self._post(chunk)
        return True

    def _call(self, method, request):
        try:
            return method(request, timeout=_CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise PushError(rpc.explain(error, self.address), error) from error
