"""The home layout of GQA caches, as arrays are packed into it: blocks of K, then V, per head."""

import ml_dtypes
import numpy as np

from sluice.v1 import common_pb2

_DTYPES = {common_pb2.ELEMENT_TYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
           common_pb2.ELEMENT_TYPE_FLOAT32: np.dtype(np.float32)}


def dtype_of(kind: common_pb2.CacheKind) -> np.dtype:
    """The numpy type of a cache kind's elements."""
    return _DTYPES[kind.element_type]


def pack(kind: common_pb2.CacheKind, parts: list[np.ndarray]) -> bytes:
    """A chunk's payload. `parts` (K and V for "kv") are [tokens, heads, dim], float32 or bfloat16.

    The first token begins a block. For each block, for each head: part 0 [t][dim], part 1 [t][dim],
    where t is kind.block_tokens, or what is left in a short last block.
    """
    stacked = np.stack(parts, axis=2).astype(dtype_of(kind), copy=False)  # [tokens, heads, parts, dim]
    tokens, heads, count, dim = stacked.shape
    whole = tokens // kind.block_tokens * kind.block_tokens
    blocks = stacked[:whole].reshape(-1, kind.block_tokens, heads, count, dim)
    payload = blocks.transpose(0, 2, 3, 1, 4).tobytes()
    return payload + stacked[whole:].transpose(1, 2, 0, 3).tobytes()


def payload_bytes(kind: common_pb2.CacheKind, heads: int, tokens: int) -> int:
    """Bytes of a chunk of so many heads and tokens."""
    return kind.bytes_per_token * heads * tokens
