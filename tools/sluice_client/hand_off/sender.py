"""Sends one prompt's caches from a rank, on a thread that reads the engine's blocks. A step never waits for it."""

import logging
import queue
import threading
from typing import Protocol

import numpy as np
from sluice.v1 import common_pb2, ingest_pb2

from sluice_client import layout
from sluice_client.errors import ToolError
from sluice_client.hand_off.parts import Part, Target
from sluice_client.hand_off.settings import CONNECTOR
from sluice_client.pusher import Pusher

_log = logging.getLogger(__name__)


class Cache(Protocol):
    """One layer's cache of one kind."""

    layer: int
    kind: str  # CacheKind.name

    def mark(self):
        """Returns what read() waits for: what the caller's stream has now. None on a CPU, which has done it."""

    def read(self, kind: common_pb2.CacheKind, blocks: tuple[int, ...], begin: int, end: int, mark) -> list[np.ndarray]:
        """Returns the parts of tokens [begin, end) for layout.pack. `blocks` are the engine's, from token 0 on."""


class Sender(threading.Thread):
    """Sends one prompt's caches of `heads`, a half-open range, in `streams` streams."""

    def __init__(self, target: Target, streams: int, heads: tuple[int, int]):
        super().__init__(daemon=True, name="sluice-sender")
        self._target = target
        self._streams = streams
        self._heads = heads
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._dropped = threading.Event()
        self._open = True  # neither end() nor drop() has been seen
        self.error = ""
        self.start()

    def add(self, cache: Cache, part: Part) -> None:
        """Sends a part of a layer, whose bytes are there when what the caller's stream has now is done."""
        self._tasks.put((cache, part, cache.mark()))

    def end(self) -> None:
        """Takes no more parts; done() follows."""
        self._tasks.put(None)

    def stop(self) -> None:
        """Stops without a word to the node. A chunk that is being read is read to its end, and may have other bytes
        by then: the caller aborts the transfer.
        """
        self._dropped.set()
        self._tasks.put(None)

    def drop(self) -> None:
        """Stops without a word to the node. Returns when no block is read any more."""
        self.stop()
        self.join()

    def done(self) -> bool:
        return not self.is_alive()

    def run(self) -> None:
        try:
            self._send()
        except ToolError as error:
            self.error = str(error)
        except Exception as error:
            _log.exception("%s: a prompt was not sent", CONNECTOR)
            self.error = f"the prefill node could not read its caches: {error!r}"
        # The thread lives until end() or drop(), and sends nothing more.
        while self._open:
            self._open = self._tasks.get() is not None

    def _send(self) -> None:
        pusher = Pusher(self._target.decode, self._streams)
        try:
            pusher.attach(self._target.transfer_id, self._target.context_length, self._target.max_chunk_bytes,
                          self._target.cached_tokens,
                          [ingest_pb2.RankPort(address=address, head_begin=begin, head_end=end)
                           for address, begin, end in self._target.rank_ports])
            while (task := self._tasks.get()) is not None:
                if not self._dropped.is_set():
                    self._write(pusher, *task)
            self._open = False
            if self._dropped.is_set():
                pusher.abandon()
            else:
                pusher.settle()
        finally:
            pusher.abandon()
            pusher.close()

    def _write(self, pusher: Pusher, cache: Cache, part: Part, mark) -> None:
        kind = pusher.kinds.get(cache.kind)
        if kind is None:
            raise ToolError(f"{self._target.decode}: its model has no cache '{cache.kind}', which the prefill node's has")
        known = self._target.cached_tokens // kind.block_tokens * kind.block_tokens
        for heads in pusher.head_parts(self._heads):
            own = slice(heads[0] - self._heads[0], heads[1] - self._heads[0])
            step = pusher.chunk_tokens(kind, heads[1] - heads[0])
            for begin in range(max(part.begin, known), part.end, step):
                tokens = (begin, min(begin + step, part.end))

                def payload(tokens=tokens, own=own):
                    return layout.pack(kind, [p[:, own] for p in cache.read(kind, part.blocks, *tokens, mark)])

                pusher.write_chunk(cache.layer, kind.name, heads, tokens, payload)
