"""The streams of a push: chunks wait in a queue, and a stream that breaks is opened again."""

import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import Callable

import google_crc32c
import grpc

from sluice.v1 import ingest_pb2, ingest_pb2_grpc
from sluice_client import rpc
from sluice_client.errors import ToolError

_log = logging.getLogger(__name__)
# A rank's port that does not take a connection for so long is left alone.
_CONNECT_S = 2.0
# Maximum number of chunks that wait for a stream, 4 MiB.
_QUEUE_CHUNKS = 4
# The node is taken to be stuck after so long without progress.
_STALL_TIMEOUT_S = 60.0
MAX_RESUMES = 5
# Pause before the first resume. Each later pause is twice as long, so that a node has 3 s in all to come back.
_FIRST_PAUSE_S = 0.1
_RESUMABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.INTERNAL,
              grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)


def resumable(error: grpc.RpcError) -> bool:
    """Returns whether sending again may help.

    ABORTED with BLOCK_BUSY says that the last chunk of a broken stream is still landing, until the node notices.
    """
    return error.code() is grpc.StatusCode.ABORTED or error.code() in _RESUMABLE


def pause_s(resume: int) -> float:
    """Returns the pause before resume number 0, 1, ..."""
    return _FIRST_PAUSE_S * 2 ** resume


class PushError(ToolError):
    """A push that failed for good. `rpc_error` is the server's answer, if it gave one."""

    def __init__(self, message: str, rpc_error: grpc.RpcError | None = None):
        super().__init__(message)
        self.rpc_error = rpc_error


@dataclass(frozen=True)
class Chunk:
    """A chunk, and how to make its bytes now and again."""

    layer: int
    kind: str
    heads: tuple[int, int]
    tokens: tuple[int, int]
    payload: Callable[[], bytes]

    def message(self, transfer_id: str) -> ingest_pb2.WriteRequest:
        payload = self.payload()
        header = ingest_pb2.ChunkHeader(
            transfer_id=transfer_id, layer=self.layer, kind=self.kind,
            head_begin=self.heads[0], head_end=self.heads[1],
            token_begin=self.tokens[0], token_end=self.tokens[1],
            crc32c=google_crc32c.value(payload))
        return ingest_pb2.WriteRequest(header=header, payload=payload)

    def meets(self, r: ingest_pb2.BlockRange) -> bool:
        return (self.layer == r.layer and self.kind == r.kind
                and self.heads[0] < r.head_end and r.head_begin < self.heads[1]
                and self.tokens[0] < r.token_end and r.token_begin < self.tokens[1])


class PushStream(threading.Thread):
    """One Write stream, which is opened again when it breaks. commit() finds the chunks that it loses missing.

    With `home`, `address` is the port of a rank of the node at `home`: when the stream to it breaks, or it cannot be
    reached, what follows goes to `home`.
    """

    def __init__(self, address: str, transfer_id: str, home: str = ""):
        super().__init__(daemon=True)
        self._address = address
        self._transfer_id = transfer_id
        self._home = home
        # The rank's port failed: chunks go to `home`.
        self.left_rank = False
        # None in the queue wakes the reader up, so that it sees _closing at once.
        self._queue: queue.Queue[Chunk | None] = queue.Queue(_QUEUE_CHUNKS)
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        # The error that ended the stream for good.
        self.error: Exception | None = None
        self.start()

    def put(self, chunk: Chunk) -> None:
        """Queues a chunk, and waits for room first. Raises the error that ended the stream for good."""
        deadline = time.monotonic() + _STALL_TIMEOUT_S
        while self.error is None and time.monotonic() < deadline:
            try:
                self._queue.put(chunk, timeout=0.1)
                return
            except queue.Full:
                continue
        raise self.error or self._stalled()

    def finish(self) -> None:
        """Takes no more chunks and waits until the server has answered. Raises the error that ended the stream."""
        self._closing.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # The reader is awake then.
        self.join(_STALL_TIMEOUT_S)
        if self.is_alive():
            self.abandon()
            raise self._stalled()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """Ends the stream at once."""
        self._abandoned.set()
        self.join()

    def run(self) -> None:
        if self._home and not self._send_to_rank():
            self._address = self._home
        elif self._home:
            return
        self._send_to(self._address)

    def _send_to_rank(self) -> bool:
        """Sends to the rank's port. Returns whether nothing is left to be sent elsewhere."""
        with rpc.open_channel(self._address) as channel:
            try:
                grpc.channel_ready_future(channel).result(_CONNECT_S)
                error = self._call(ingest_pb2_grpc.KvIngestStub(channel))
            except grpc.FutureTimeoutError:
                error = "it cannot be reached"
        if error is None or self.error is not None or self._abandoned.is_set():
            return True
        self.left_rank = True
        _log.warning("%s, the port of a rank, takes no caches: sending to %s: %s", self._address, self._home,
                     error if isinstance(error, str) else rpc.explain(error, self._address))
        return False

    def _call(self, stub: ingest_pb2_grpc.KvIngestStub) -> Exception | None:
        """Runs one call to its end. Returns its error, if it has one that counts."""
        over = threading.Event()
        call = stub.Write.future(self._messages(over))
        call.add_done_callback(lambda _, event=over: event.set())
        while not over.wait(0.1):
            if self._abandoned.is_set():
                call.cancel()
        return None if call.cancelled() else call.exception()

    def _send_to(self, address: str) -> None:
        failures = 0
        with rpc.open_channel(address) as channel:
            stub = ingest_pb2_grpc.KvIngestStub(channel)
            while not self._abandoned.is_set():
                error = self._call(stub)
                if self.error is not None or self._abandoned.is_set():
                    return
                if error is not None:
                    failures += 1
                    if not resumable(error) or failures > MAX_RESUMES:
                        self.error = PushError(rpc.explain(error, address), error)
                        return
                    self._abandoned.wait(pause_s(failures - 1))
                if self._closing.is_set() and self._queue.empty():
                    return

    def _messages(self, over: threading.Event):
        """Yields the messages of the call, which a thread of gRPC's takes until the call is over."""
        while not over.is_set():
            closing = self._closing.is_set()
            try:
                chunk = self._queue.get(block=not closing, timeout=0.05)
            except queue.Empty:
                if closing:
                    return
                continue
            if chunk is None:
                continue
            try:
                message = chunk.message(self._transfer_id)
            except Exception as error:  # the caller's own callable failed
                self.error = error
                raise
            yield message

    def _stalled(self) -> "PushError":
        return PushError(f"{self._address} took nothing for {_STALL_TIMEOUT_S:g} s")
