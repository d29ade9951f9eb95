"""Reads the blocks of an engine's caches, and makes their bytes those of the decode node.

Every cache is seen as [blocks, heads, tokens, content], whatever its strides. `content` is K, then V, or one of them, or
a latent entry, or an index key. Nothing here imports torch at the top, so that the layouts are tested without it:
arrays of numpy will do.
"""

import threading
from dataclasses import dataclass, field
from typing import Callable

import ml_dtypes
import numpy as np
from sluice.v1 import common_pb2

from sluice_client import latent, layout

ENTRY_BYTES = 656  # of a latent entry in fp8: 512 e4m3, 4 float32 scales, 64 bfloat16
INDEX_DIM = 128
INDEX_BYTES = INDEX_DIM + 4  # of an index key: 128 e4m3, a float32 scale
_streams = threading.local()

# Makes the parts [tokens, heads, bytes] of layout.pack from content [tokens, heads, elements].
ToParts = Callable[[common_pb2.CacheKind, np.ndarray], list[np.ndarray]]


def _on_gpu(tensor) -> bool:
    return getattr(getattr(tensor, "device", None), "type", "cpu") == "cuda"


def _fetch(tensor, blocks: list[int], mark) -> np.ndarray:
    """Returns blocks of a cache on the host. On a GPU this thread's own stream copies them, behind `mark`."""
    if not _on_gpu(tensor):
        return layout.host_array(tensor[blocks])
    import torch  # noqa: PLC0415
    if getattr(_streams, "copy", None) is None:
        _streams.copy = torch.cuda.Stream(tensor.device)
    with torch.cuda.stream(_streams.copy):
        _streams.copy.wait_event(mark)
        found = tensor[torch.tensor(blocks, device=tensor.device)]
        pinned = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        pinned.copy_(found, non_blocking=True)
    _streams.copy.synchronize()
    return layout.host_array(pinned)


def split_kv(head_dim: int) -> ToParts:
    """Content is K, then V, of one head."""
    def parts(kind, content):
        return layout.kv_parts(kind, content[..., :head_dim], content[..., head_dim:2 * head_dim])
    return parts


def latent_entries(rank: int) -> ToParts:
    """Content is `rank` latent values, then RoPE, or a packed entry of 656 bytes."""
    def parts(kind, content):
        rows = content[:, 0]
        if rows.dtype.itemsize > 1:
            return latent.entry_parts(kind, rows[:, :rank], rows[:, rank:])
        if layout.is_packed(kind):
            return [np.ascontiguousarray(rows).view(np.uint8)[:, None]]
        raise ValueError("the prefill node's latent cache is fp8, and the decode node's is not: start that with "
                         "--kv-dtype fp8")
    return parts


def _stored_keys(content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the e4m3 bytes [tokens, 128] and float32 scales [tokens, 1] of index keys."""
    rows = np.ascontiguousarray(content[:, 0]).view(np.uint8)
    return np.ascontiguousarray(rows[:, :INDEX_DIM]), np.ascontiguousarray(rows[:, INDEX_DIM:]).view(np.float32)


def index_keys(kind: common_pb2.CacheKind, content: np.ndarray) -> list[np.ndarray]:
    """Content is 128 e4m3 values and their float32 scale. The keys are not transformed, so they are rounded again."""
    values, scales = _stored_keys(content)
    return latent.index_parts(kind, values.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales)


def transformed_index_keys(kind: common_pb2.CacheKind, content: np.ndarray) -> list[np.ndarray]:
    """Content is as in index_keys, after the Hadamard transform, as a packed decode node keeps it."""
    values, scales = _stored_keys(content)
    if layout.is_packed(kind):
        return [values[:, None], scales.view(np.uint8)[:, None]]
    # The transform is its own inverse.
    return latent.index_parts(kind, latent.hadamard(values.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales))


def plain_block(block: np.ndarray) -> np.ndarray:
    """[blocks, heads, tokens, content] as vLLM says."""
    return block


def keys_then_scales(block: np.ndarray) -> np.ndarray:
    """A block has its tokens' 128 values, then their scales: [blocks, 1, tokens, 132] as one row for each token."""
    blocks, _, tokens, content = block.shape
    raw = np.ascontiguousarray(block).view(np.uint8).reshape(blocks, tokens * content)
    values = raw[:, :tokens * INDEX_DIM].reshape(blocks, 1, tokens, INDEX_DIM)
    scales = raw[:, tokens * INDEX_DIM:].reshape(blocks, 1, tokens, content - INDEX_DIM)
    return np.concatenate([values, scales], axis=3)


@dataclass(frozen=True)
class LayerCache:
    """One layer's cache of one kind."""

    layer: int
    kind: str  # CacheKind.name
    tensor: object  # [blocks, heads, tokens, content]
    block_size: int  # tokens of one of the scheduler's blocks: a multiple of the tensor's
    rows: Callable[[np.ndarray], np.ndarray] = field(default=plain_block)
    parts: ToParts = field(default=None)

    def mark(self):
        """Returns what read() waits for: what the caller's stream has now. None on a CPU, which has done it."""
        if not _on_gpu(self.tensor):
            return None
        import torch  # noqa: PLC0415
        return torch.cuda.current_stream(self.tensor.device).record_event()

    def content(self, blocks: tuple[int, ...], begin: int, end: int, mark) -> np.ndarray:
        """Returns tokens [begin, end), [tokens, heads, content]. `blocks` are the scheduler's, from token 0 on."""
        tokens = self.tensor.shape[2]
        within = self.block_size // tokens
        first, last = begin // tokens, -(-end // tokens)
        numbers = [blocks[i // within] * within + i % within for i in range(first, last)]
        block = self.rows(_fetch(self.tensor, numbers, mark))
        content = block.transpose(0, 2, 1, 3).reshape(-1, block.shape[1], block.shape[3])
        return content[begin - first * tokens:end - first * tokens]

    def read(self, kind: common_pb2.CacheKind, blocks: tuple[int, ...], begin: int, end: int, mark) -> list[np.ndarray]:
        """Returns the parts of tokens [begin, end) for layout.pack."""
        return self.parts(kind, self.content(blocks, begin, end, mark))


@dataclass(frozen=True)
class KeysAndValues:
    """One layer's K and V, which are caches of their own."""

    keys: LayerCache
    values: LayerCache

    @property
    def layer(self) -> int:
        return self.keys.layer

    @property
    def kind(self) -> str:
        return self.keys.kind

    def mark(self):
        return self.keys.mark()

    def read(self, kind: common_pb2.CacheKind, blocks: tuple[int, ...], begin: int, end: int, mark) -> list[np.ndarray]:
        """Returns the parts of tokens [begin, end) for layout.pack."""
        return layout.kv_parts(kind, *(c.content(blocks, begin, end, mark) for c in (self.keys, self.values)))
