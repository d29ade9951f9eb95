"""Converts the caches of latent attention (DeepSeek-V3.2) to the form that a decode node keeps: entries and index keys.

In the packed form (kernels/latent_params.h) an entry is 512 e4m3 values, four float32 scales of 128 values each,
and 64 bfloat16 RoPE values; an index key is 128 e4m3 values, after a Walsh-Hadamard transform, and one float32
scale. In the other forms nothing is scaled or transformed.
"""

import ml_dtypes
import numpy as np

from sluice.v1 import common_pb2
from sluice_client import layout

_LARGEST = np.float32(448)
_SCALED = 128  # values that share one scale
# Factors between the scale of a group of latent values and the least possible scale; each group takes the best
# factor (kernels/latent_scales.h).
_LATENT_SCALES = [np.float32(2 ** (i / 8)) for i in range(8)]
_INDEX_DIM = 128


def quantise(values: np.ndarray, factors=(np.float32(1),)) -> tuple[np.ndarray, np.ndarray]:
    """Returns the e4m3 bytes [..., n] and float32 scales [..., n / 128] of float32 values [..., n].

    Each group has the scale amax / 448 * factor with the least squared error, and the first of equals.
    """
    groups = values.astype(np.float32).reshape(*values.shape[:-1], -1, _SCALED)
    least = np.abs(groups).max(axis=-1) / _LARGEST
    least = np.where(least == 0, np.float32(1), least)

    def rounded(scales):
        return (groups / scales[..., None]).astype(ml_dtypes.float8_e4m3fn)

    def error(scales):
        back = rounded(scales).astype(np.float64) * scales[..., None]
        return np.square(back - groups).sum(axis=-1)

    candidates = [least * factor for factor in factors]
    best = np.argmin([error(scales) for scales in candidates], axis=0)
    scales = np.choose(best, candidates)
    return rounded(scales).view(np.uint8).reshape(values.shape), scales


def hadamard(values: np.ndarray) -> np.ndarray:
    """Returns the Walsh-Hadamard transform along the last axis, which has 128 values, scaled by 128^-1/2."""
    out = values.astype(np.float32)
    step = 1
    while step < _INDEX_DIM:
        pairs = out.reshape(*values.shape[:-1], -1, 2, step)
        out = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]],
                       axis=-2).reshape(values.shape)
        step *= 2
    return out * np.float32(_INDEX_DIM ** -0.5)


def entry_parts(kind: common_pb2.CacheKind, latent: np.ndarray, rope: np.ndarray) -> list[np.ndarray]:
    """Returns the parts of entries for layout.pack.

    `latent` is [tokens, rank] after kv_a_layernorm, `rope` is [tokens, rope] after RoPE in interleaved pairs.
    """
    if not layout.is_packed(kind):
        dtype = layout.dtype_of(kind)
        return [layout.as_bytes(np.concatenate([latent.astype(dtype), rope.astype(dtype)], axis=1)[:, None],
                                dtype)]
    values, scales = quantise(latent, _LATENT_SCALES)
    return [np.concatenate([values, scales.view(np.uint8), layout.as_bytes(rope, ml_dtypes.bfloat16)],
                           axis=1)[:, None]]


def index_parts(kind: common_pb2.CacheKind, keys: np.ndarray) -> list[np.ndarray]:
    """Returns the parts of index keys for layout.pack: [tokens, 128] after k_norm and RoPE, before any transform."""
    if not layout.is_packed(kind):
        return [layout.as_bytes(keys[:, None], layout.dtype_of(kind))]
    values, scales = quantise(hadamard(keys))
    return [values[:, None], scales.view(np.uint8)[:, None]]
