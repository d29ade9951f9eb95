"""KV events as a router sees them: vLLM's classes, by their shape, and a subscriber that keeps a list of blocks.

The classes are those of vllm/distributed/kv_events.py, field for field; msgspec refuses whatever does not fit them.
"""

import time
from typing import Any

import msgspec
import zmq
from support.nodes import SCALE

END = (-1).to_bytes(8, "big", signed=True)


def classes(array_like: bool):
    """Returns KVEventBatch of vLLM 0.32 (events are maps), or of older ones (arrays)."""

    class Event(msgspec.Struct, array_like=array_like, omit_defaults=True, gc=False, tag=True):
        pass

    class BlockStored(Event):
        block_hashes: list[int | bytes]
        parent_block_hash: int | bytes | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[tuple[Any, ...] | None] | None = None
        group_idx: int | None = None

    class BlockRemoved(Event):
        block_hashes: list[int | bytes]
        medium: str | None
        group_idx: int | None = None

    class AllBlocksCleared(Event):
        pass

    class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
        ts: float
        events: list[BlockStored | BlockRemoved | AllBlocksCleared]
        data_parallel_rank: int | None = None

    return KVEventBatch


class Subscriber:
    """Subscribes to a node's events. `blocks`: the tokens of each known block, with its parent's hash."""

    def __init__(self, endpoint: str | None = None, topic: str = "", array_like: bool = False):
        self.decoder = msgspec.msgpack.Decoder(classes(array_like), strict=True)
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.linger = 0
        self.topic = topic.encode()
        self.array_like = array_like
        self.socket.subscribe(self.topic)
        if endpoint is not None:
            self.socket.connect(endpoint)
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.batches: list[tuple[int, bytes]] = []
        self.cleared = 0

    def read(self, until, seconds: float = 30) -> bool:
        """Reads until a predicate of this subscriber holds; returns whether it came to."""
        deadline = time.monotonic() + seconds * SCALE
        while not until(self):
            if time.monotonic() > deadline:
                return False
            if not self.socket.poll(50):
                continue
            topic, sequence, payload = self.socket.recv_multipart()
            assert topic == self.topic and len(sequence) == 8
            number = int.from_bytes(sequence, "big")
            if not self.batches or number > self.batches[-1][0]:  # else it was replayed before
                self.take(number, payload)
        return True

    def take(self, sequence: int, payload: bytes) -> None:
        assert not self.batches or sequence == self.batches[-1][0] + 1
        self.batches.append((sequence, payload))
        batch = self.decoder.decode(payload)
        if not self.array_like:  # arrays would have what is optional, too
            assert msgspec.msgpack.encode(batch) == payload  # byte for byte as vLLM would have written it
        assert abs(batch.ts - time.time()) < 3600 and batch.data_parallel_rank == 0
        for event in batch.events:
            match type(event).__name__:
                case "BlockStored":
                    self.stored(event)
                case "BlockRemoved":
                    for block in event.block_hashes:
                        del self.blocks[block]
                case "AllBlocksCleared":
                    self.blocks.clear()
                    self.cleared += 1

    def stored(self, event) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes) and event.medium == "CPU"
        parent = event.parent_block_hash
        assert parent is None or parent in self.blocks
        for i, block in enumerate(event.block_hashes):
            self.blocks[block] = (parent, tuple(event.token_ids[i * size:(i + 1) * size]))
            parent = block

    def prompts(self) -> set[tuple[int, ...]]:
        """Returns the known prefixes that no other known one begins with."""
        inner = {parent for parent, _ in self.blocks.values()}
        return {self.prefix(block) for block in self.blocks if block not in inner}

    def prefix(self, block: int) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        while block is not None:
            block, own = self.blocks[block]
            tokens = own + tokens
        return tokens

    def close(self) -> None:
        self.socket.close()


def replay(endpoint: str, start: int, topic: str = "", array_like: bool = False) -> list[tuple[int, bytes]]:
    """Returns the batches that the node sends again, from that sequence number on."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(endpoint)
    socket.send_multipart((b"", start.to_bytes(8, "big")))
    batches = []
    while True:
        assert socket.poll(30_000 * SCALE), "no end marker"
        frames = socket.recv_multipart()
        assert frames.pop(0) == b""
        if not array_like:
            assert frames.pop(0) == (b"" if frames[-2] == END else topic.encode())
        sequence, payload = frames
        if sequence == END:
            assert payload == b""
            socket.close()
            return batches
        batches.append((int.from_bytes(sequence, "big"), payload))
