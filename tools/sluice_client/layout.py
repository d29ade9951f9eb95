"""Packs arrays into the layout of the host KV cache: in each block, for each head, an array for each part."""

import ml_dtypes
import numpy as np

from sluice.v1 import common_pb2

_DTYPES = {common_pb2.ELEMENT_TYPE_BFLOAT16: np.dtype(ml_dtypes.bfloat16),
           common_pb2.ELEMENT_TYPE_FLOAT32: np.dtype(np.float32),
           common_pb2.ELEMENT_TYPE_FLOAT8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn)}


def dtype_of(kind: common_pb2.CacheKind) -> np.dtype:
    """Returns the numpy type of a cache kind's elements."""
    return _DTYPES[kind.element_type]


def is_packed(kind: common_pb2.CacheKind) -> bool:
    """Returns whether elements are e4m3 with scales beside them, which only "latent" and "index" can be."""
    return kind.element_type == common_pb2.ELEMENT_TYPE_FLOAT8_E4M3


def host_array(tensor) -> np.ndarray:
    """Returns a tensor's numbers as an array; numpy has no bfloat16 and no e4m3 of its own."""
    if isinstance(tensor, np.ndarray):
        return tensor
    import torch  # noqa: PLC0415 - absent where the layouts are tested with numpy
    tensor = tensor.detach().cpu()
    for dtype, raw, numpy_type in ((torch.bfloat16, torch.int16, ml_dtypes.bfloat16),
                                   (torch.float8_e4m3fn, torch.uint8, ml_dtypes.float8_e4m3fn)):
        if tensor.dtype == dtype:
            return tensor.view(raw).numpy().view(numpy_type)
    return tensor.numpy()


def pack(kind: common_pb2.CacheKind, parts: list[np.ndarray]) -> bytes:
    """Returns the payload of a chunk. Each of `parts` is [tokens, heads, part_bytes[i]] of uint8.

    The first token begins a block. The payload has for each block and each head part 0 [t][bytes], then part 1
    [t][bytes], and so on. t is kind.block_tokens, or the number of tokens in a short last block.
    """
    tokens, heads, _ = parts[0].shape
    whole = tokens // kind.block_tokens * kind.block_tokens

    def blocks(begin: int, end: int, size: int) -> bytes:
        if begin == end:
            return b""
        arrays = [np.ascontiguousarray(part[begin:end]).reshape(-1, size, heads, part.shape[2])
                  .transpose(0, 2, 1, 3).reshape(-1, heads, size * part.shape[2]) for part in parts]
        return np.concatenate(arrays, axis=2).tobytes()

    return blocks(0, whole, kind.block_tokens) + blocks(whole, tokens, tokens - whole)


def as_bytes(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the bytes, [tokens, heads, bytes], of an array [tokens, heads, dim] converted to `dtype`."""
    return np.ascontiguousarray(array, dtype=dtype).view(np.uint8)


def kv_parts(kind: common_pb2.CacheKind, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """Returns the parts of K (after RoPE) and V, [tokens, heads, head_dim] of float32 or bfloat16, for pack()."""
    return [as_bytes(a, dtype_of(kind)) for a in (k, v)]


def payload_bytes(kind: common_pb2.CacheKind, heads: int, tokens: int) -> int:
    """Returns the payload bytes of a chunk."""
    return kind.bytes_per_token * heads * tokens
