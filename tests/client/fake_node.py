"""A decode and prefill node in this process for the client's tests. It stores blocks, and breaks on demand."""

import threading
from concurrent import futures

import google_crc32c
import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from sluice.v1 import (admin_pb2, admin_pb2_grpc, common_pb2, decode_pb2, decode_pb2_grpc, ingest_pb2,
                       ingest_pb2_grpc, prefill_pb2, prefill_pb2_grpc)

LAYERS, HEADS, DIM, BLOCK = 2, 3, 4, 8


def status_details(code: grpc.StatusCode, message: str, *details):
    """Returns the metadata that carries google.rpc details."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return (("grpc-status-details-bin", status.SerializeToString()),)


class FakeNode(ingest_pb2_grpc.KvIngestServicer, decode_pb2_grpc.DecodeServicer,
               admin_pb2_grpc.AdminServicer, prefill_pb2_grpc.PrefillServicer):
    def __init__(self, element_type=common_pb2.ELEMENT_TYPE_BFLOAT16, fingerprint="f1", has_admin=True):
        self.fingerprint = fingerprint
        size = 2 if element_type == common_pb2.ELEMENT_TYPE_BFLOAT16 else 4
        self.kind = common_pb2.CacheKind(name="kv", element_type=element_type, heads=HEADS,
                                         block_tokens=BLOCK, part_bytes=[DIM * size] * 2,
                                         bytes_per_token=2 * DIM * size)
        self.lock = threading.Lock()
        self.manifest = None
        self.blocks = {}  # (layer, head, first token) -> bytes
        self.committed = None
        self.aborted = None
        self.write_calls = 0
        self.rank_ports = []  # that Reserve names
        self.cached_tokens = 0  # leading tokens that Reserve says are here already
        self.damage = 0  # chunks that will still arrive damaged
        self.breaks = 0  # Write calls that will still break at their second chunk
        self.answer = [[5, 6], [7]]  # ids that Generate streams, a list for each message
        self.finish = decode_pb2.Finish(reason=decode_pb2.FINISH_REASON_LENGTH)
        self.exact_tokens = 1 << 16  # of what Generate streams, from the first on
        self.refusal = None  # (code, message, details...) with which Generate ends
        self.kept = []  # ids of the sequences that are kept
        self.kept_so_far = 0
        self.longest_keep_s = 60
        self.loses_sequences = False
        self.hang = False
        self.cancelled = threading.Event()
        self.is_prefill = False
        self.draining = None  # sequences that still run, one less at every look; None: not draining
        self.drained_within = None
        self.requests = []
        self.server = grpc.server(futures.ThreadPoolExecutor(8))
        for add in (ingest_pb2_grpc.add_KvIngestServicer_to_server,
                    decode_pb2_grpc.add_DecodeServicer_to_server,
                    prefill_pb2_grpc.add_PrefillServicer_to_server,
                    *([admin_pb2_grpc.add_AdminServicer_to_server] if has_admin else [])):
            add(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def GetModel(self, request, context):
        info = common_pb2.ModelInfo(fingerprint=self.fingerprint, architecture="llama", layers=LAYERS, heads=HEADS,
                                    kv_heads=HEADS, head_dim=DIM, vocab_size=100, max_context=512,
                                    cache_kinds=[self.kind], name="fake")
        if isinstance(request, prefill_pb2.GetPrefillModelRequest):
            return prefill_pb2.GetPrefillModelResponse(model=info)
        return admin_pb2.GetModelResponse(model=info, device="cpu", policy="full", kernels="none",
                                          version="0")

    def Drain(self, request, context):
        was, self.draining = self.draining is not None, 2
        self.drained_within = request.timeout if request.HasField("timeout") else None
        return admin_pb2.DrainResponse(was_draining=was, running=2)

    def Resume(self, request, context):
        was, self.draining = self.draining is not None, None
        return admin_pb2.ResumeResponse(was_draining=was)

    def GetCapacity(self, request, context):
        if self.draining is not None:
            self.draining -= 1
            return admin_pb2.GetCapacityResponse(max_sequences=4, running=self.draining, draining=True)
        return admin_pb2.GetCapacityResponse(max_sequences=4, running=1, tiers=[
            admin_pb2.TierCapacity(tier="hbm", kind="kv", capacity_bytes=1 << 30,
                                   reserved_bytes=1 << 29, used_bytes=1 << 20)])

    def ListSequences(self, request, context):
        if self.is_prefill:
            self.refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "a prefill node has no sequences",
                        error_details_pb2.ErrorInfo(reason="PREFILL_NODE"))
        return admin_pb2.ListSequencesResponse(total=3, sequences=[admin_pb2.SequenceInfo(
            request_id="r1", state=admin_pb2.SequenceInfo.STATE_RUNNING, prompt_tokens=9)])

    def Reserve(self, request, context):
        self.manifest = request.manifest
        return ingest_pb2.ReserveResponse(transfer_id="ab" * 16, max_chunk_bytes=self.chunk_bytes(),
                                          cached_tokens=self.cached_tokens, rank_ports=self.rank_ports)

    def chunk_bytes(self):
        return 2 * BLOCK * HEADS * self.kind.bytes_per_token  # Two blocks of all heads.

    def Write(self, requests, context):
        with self.lock:
            self.write_calls += 1
            breaks = self.breaks > 0
            self.breaks -= breaks
        for n, message in enumerate(requests):
            if breaks and n == 1:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
            self._land(message, context)
        return ingest_pb2.WriteResponse()

    def _land(self, message, context):
        h = message.header
        with self.lock:
            damaged = self.damage > 0
            self.damage -= damaged
        if damaged or google_crc32c.value(message.payload) != h.crc32c:
            context.abort(grpc.StatusCode.DATA_LOSS, "checksum mismatch")
        heads, tokens = h.head_end - h.head_begin, h.token_end - h.token_begin
        per_token = self.kind.bytes_per_token
        if h.token_begin % BLOCK or len(message.payload) != heads * tokens * per_token:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "payload: wrong size")
        at = 0
        for first in range(h.token_begin, h.token_end, BLOCK):
            size = min(BLOCK, h.token_end - first) * per_token
            for head in range(h.head_begin, h.head_end):
                with self.lock:
                    self.blocks[h.layer, head, first] = message.payload[at:at + size]
                at += size

    def _missing(self):
        length = self.manifest.context_length
        return [ingest_pb2.BlockRange(layer=layer, kind="kv", head_begin=head, head_end=head + 1,
                                      token_begin=first, token_end=min(first + BLOCK, length))
                for layer in range(LAYERS) for head in range(HEADS)
                for first in range(0, length, BLOCK)
                if first >= self.cached_tokens and (layer, head, first) not in self.blocks]

    def Commit(self, request, context):
        missing = self._missing()
        if missing:
            detail = ingest_pb2.MissingBlocks(count=len(missing), ranges=missing[:64])
            context.set_trailing_metadata(status_details(
                grpc.StatusCode.FAILED_PRECONDITION, "blocks are missing", detail))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "blocks are missing")
        self.committed = request
        return ingest_pb2.CommitResponse(context_length=self.manifest.context_length)

    def Abort(self, request, context):
        self.aborted = request
        return ingest_pb2.AbortResponse()

    def GetTransfer(self, request, context):
        missing = self._missing()
        return ingest_pb2.GetTransferResponse(
            missing=ingest_pb2.MissingBlocks(count=len(missing), ranges=missing[:1024]))

    def Run(self, request, context):
        self.requests.append(request)
        return prefill_pb2.RunResponse(transfer_id="cd" * 16)

    def refuse(self, context, code, message, *details):
        context.set_trailing_metadata(status_details(code, message, *details))
        context.abort(code, message)

    def Forget(self, request, context):
        found = request.sequence_id in self.kept
        if found:
            self.kept.remove(request.sequence_id)
        return decode_pb2.ForgetResponse(found=found)

    def Generate(self, request, context):
        self.requests.append(request)
        if self.refusal:
            self.refuse(context, *self.refusal)
        if request.keep.seconds > self.longest_keep_s:
            violation = error_details_pb2.BadRequest.FieldViolation(field="keep", description="at most 1m")
            self.refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "keep is too long",
                        error_details_pb2.BadRequest(field_violations=[violation]))
        if request.HasField("sequence_id"):
            if self.loses_sequences or request.sequence_id not in self.kept:
                self.refuse(context, grpc.StatusCode.NOT_FOUND, "no such sequence",
                            error_details_pb2.ErrorInfo(reason="SEQUENCE_NOT_FOUND"))
            self.kept.remove(request.sequence_id)
        # This comes before the first token, because a caller that has the token may leave before the next line runs.
        if self.hang and not context.add_callback(self.cancelled.set):
            self.cancelled.set()
        for ids in self.answer:
            yield decode_pb2.GenerateResponse(tokens=[
                common_pb2.Token(id=i, logprob=-i / 8, top_logprobs=[
                    common_pb2.TokenLogprob(token_id=i, logprob=-i / 8)]) for i in ids])
        if self.hang:
            self.cancelled.wait(20)
        finish = decode_pb2.Finish()
        finish.CopyFrom(self.finish)
        finish.usage.exact_tokens = self.exact_tokens
        if request.HasField("keep"):
            self.kept_so_far += 1
            self.kept.append(f"{self.kept_so_far:032x}")
            finish.sequence_id = self.kept[-1]
        yield decode_pb2.GenerateResponse(finish=finish)
