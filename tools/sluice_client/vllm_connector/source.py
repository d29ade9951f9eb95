"""KvSource of a vLLM whose prompts are held: decode nodes read them out of vLLM's blocks.

A prompt is held from the step on that computes its end, so that a reader who has the answer finds it. It is held until
its reader releases it or its lease ends. vLLM keeps its blocks for so long, and until the last reader has left.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import google_crc32c
import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from sluice.v1 import admin_pb2, admin_pb2_grpc, common_pb2, ingest_pb2, source_pb2, source_pb2_grpc

from sluice_client import layout, rpc
from sluice_client.hand_off.caches import LayerCache
from sluice_client.hand_off.shape import EngineShape, check_node
from sluice_client.vllm_connector.plan import Held
from sluice_client.vllm_connector.settings import Settings

_MOST_CHUNK_BYTES = 1 << 20
_READERS = 16  # streams at the same time
_CALL_S = 10.0
_DROP_POLL_S = 0.001


@dataclass
class _Prompt:
    held: Held
    marks: list
    lease_end: float
    readers: int = 0
    gone: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


def _abort(context, code: grpc.StatusCode, message: str, reason: str = "") -> None:
    if reason:
        packed = any_pb2.Any()
        packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="sluice"))
        status = status_pb2.Status(code=code.value[0], message=message, details=[packed])
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, message)


class PromptSource(source_pb2_grpc.KvSourceServicer):
    """Serves held prompts at Settings.listen. hold(), over() and drop() are for one thread; calls come on others."""

    def __init__(self, settings: Settings, shape: EngineShape, caches: list[LayerCache]):
        """Raises ValueError if the address is taken."""
        self._settings = settings
        self._shape = shape
        self._caches = caches
        self._model: common_pb2.ModelInfo | None = None
        self._lock = threading.Lock()
        self._prompts: dict[str, _Prompt] = {}  # by source_id
        self._server = grpc.server(ThreadPoolExecutor(_READERS, thread_name_prefix="sluice-source"),
                                   options=[("grpc.so_reuseport", 0)])
        source_pb2_grpc.add_KvSourceServicer_to_server(self, self._server)
        self._listen()
        self._server.start()

    def hold(self, held: Held) -> None:
        """Holds a prompt whose caches are in vLLM's blocks when what the caller's stream has now is done."""
        prompt = _Prompt(held, [cache.mark() for cache in self._caches], time.monotonic() + self._settings.hold_seconds)
        with self._lock:
            self._prompts[held.source_id] = prompt

    def over(self, request_id: str) -> bool:
        """Returns whether nobody reads a request's prompt and nobody will, and forgets it if so."""
        with self._lock:
            prompt = next((p for p in self._prompts.values() if p.held.request_id == request_id), None)
            if prompt is None:
                return True
            with prompt.lock:
                if prompt.readers > 0 or not prompt.gone and prompt.lease_end > time.monotonic():
                    return False
                prompt.gone = True
            del self._prompts[prompt.held.source_id]
            return True

    def drop(self, request_id: str) -> None:
        """Ends a prompt at once, and waits until its readers have left: its blocks will be another's."""
        while not self.over(request_id):
            with self._lock:
                for prompt in self._prompts.values():
                    if prompt.held.request_id == request_id:
                        prompt.gone = True
            time.sleep(_DROP_POLL_S)

    def close(self) -> None:
        self._server.stop(None)

    # Calls of decode nodes.

    def Describe(self, request, context):
        with self._reading(request, context) as prompt:
            model = self._model_of_nodes(context)
            answer = source_pb2.DescribeResponse(
                model_fingerprint=model.fingerprint, cache_kinds=model.cache_kinds,
                context_length=prompt.held.context_length, prompt_digest=prompt.held.digest,
                bytes=sum(k.bytes_per_token * k.heads for k in model.cache_kinds) * model.layers
                * prompt.held.context_length)
            answer.lease_left.FromNanoseconds(int(max(prompt.lease_end - time.monotonic(), 0) * 1e9))
            return answer

    def Read(self, request, context):
        with self._reading(request, context) as prompt:
            model = self._model_of_nodes(context)
            kinds = {kind.name: kind for kind in model.cache_kinds}
            wanted = self._wanted(request, prompt, kinds, context)
            most = min(request.max_chunk_bytes or _MOST_CHUNK_BYTES, _MOST_CHUNK_BYTES)
            for cache, mark in zip(self._caches, prompt.marks):
                kind = kinds[cache.kind]
                blocks = max(1, most // layout.payload_bytes(kind, kind.heads, kind.block_tokens))
                step = blocks * kind.block_tokens
                ranges = [(0, prompt.held.context_length)] if wanted is None else [
                    (r.token_begin, r.token_end) for r in wanted if r.layer == cache.layer and r.kind == cache.kind]
                first = min((r[0] for r in ranges), default=0) // kind.block_tokens * kind.block_tokens
                for begin in range(first, max((r[1] for r in ranges), default=0), step):
                    end = min(begin + step, prompt.held.context_length)
                    if not any(r[0] < end and begin < r[1] for r in ranges):
                        continue
                    if prompt.gone:
                        self._no_source(context)
                    self._renew(prompt)
                    payload = layout.pack(kind, cache.read(kind, prompt.held.blocks, begin, end, mark))
                    yield source_pb2.ReadResponse(payload=payload, header=ingest_pb2.ChunkHeader(
                        transfer_id=request.source_id, layer=cache.layer, kind=cache.kind, head_begin=0,
                        head_end=kind.heads, token_begin=begin, token_end=end, crc32c=google_crc32c.value(payload)))

    def Renew(self, request, context):
        with self._reading(request, context) as prompt:
            most = self._settings.hold_seconds
            asked = request.lease.ToNanoseconds() * 1e-9 if request.HasField("lease") else most
            granted = min(max(asked, 0.0), most)
            prompt.lease_end = time.monotonic() + granted
            answer = source_pb2.RenewResponse()
            answer.lease.FromNanoseconds(int(granted * 1e9))
            return answer

    def Release(self, request, context):
        with self._lock:
            prompt = self._prompts.get(request.source_id)
        if prompt is None or prompt.held.tenant != request.tenant:
            return source_pb2.ReleaseResponse(found=False)
        with prompt.lock:
            found, prompt.gone = not prompt.gone, True
        return source_pb2.ReleaseResponse(found=found)

    @contextmanager
    def _reading(self, request, context):
        """Keeps a prompt's blocks while a call is under way. Aborts the call if the prompt is not held."""
        with self._lock:
            prompt = self._prompts.get(request.source_id)
            if prompt is not None and prompt.held.tenant == request.tenant:
                with prompt.lock:
                    if not prompt.gone and prompt.lease_end > time.monotonic():
                        prompt.readers += 1
                    else:
                        prompt = None
            else:
                prompt = None
        if prompt is None:
            self._no_source(context)
        try:
            self._renew(prompt)
            yield prompt
        finally:
            with prompt.lock:
                prompt.readers -= 1

    def _renew(self, prompt: _Prompt) -> None:
        prompt.lease_end = time.monotonic() + self._settings.hold_seconds

    def _no_source(self, context) -> None:
        _abort(context, grpc.StatusCode.NOT_FOUND, "no prompt is held under this source_id", "SOURCE_NOT_FOUND")

    def _wanted(self, request, prompt, kinds, context):
        """Returns the ranges to send, or None for everything. Aborts the call if one lies outside."""
        for i, r in enumerate(request.ranges):
            kind = kinds.get(r.kind)
            if kind is None or r.layer >= self._shape.layers or not r.head_begin < r.head_end <= kind.heads \
                    or not r.token_begin < r.token_end <= prompt.held.context_length:
                _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"ranges[{i}]: lies outside of the held caches")
        return list(request.ranges) or None

    def _model_of_nodes(self, context) -> common_pb2.ModelInfo:
        """Returns the model of the decode nodes, whose form the caches are sent in."""
        if self._model is not None:
            return self._model
        problem = ""
        for address in self._settings.decode:
            with rpc.open_channel(address) as channel:
                try:
                    model = admin_pb2_grpc.AdminStub(channel).GetModel(admin_pb2.GetModelRequest(), timeout=_CALL_S).model
                except grpc.RpcError as error:
                    problem = rpc.explain(error, address)
                    continue
            problem = check_node(self._shape, model, self._settings.fingerprint, address)
            if not problem:
                self._model = model
                return model
        _abort(context, grpc.StatusCode.FAILED_PRECONDITION, problem, "SOURCE_MISMATCH")

    def _listen(self) -> None:
        s = self._settings
        try:
            if s.ca:
                pem = [Path(path).read_bytes() for path in (s.key, s.cert, s.ca)]
                credentials = grpc.ssl_server_credentials([tuple(pem[:2])], pem[2], require_client_auth=True)
                self._server.add_secure_port(s.listen, credentials)
            else:
                self._server.add_insecure_port(s.listen)
        except (OSError, RuntimeError) as error:
            raise ValueError(f"kv_connector_extra_config.listen: {s.listen}: {error}") from None
