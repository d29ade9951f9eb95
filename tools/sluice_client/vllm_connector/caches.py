"""How vLLM's caches lie.

vLLM (0.30 and later) shows every layer's cache as [blocks, heads, tokens, content], whatever its strides; older views
are refused. `content` is K, then V (FlashAttention, FlashInfer, Triton), or a latent entry, or an index key. The CPU
backend's blocks are packed for its kernels: its order of elements is measured with its own operator, since it differs
from processor to processor.

Nothing here imports torch at the top, so that the layouts are tested without it: arrays of numpy will do.
"""

import re
from typing import Callable

import numpy as np

from sluice_client.hand_off.caches import (ENTRY_BYTES, INDEX_BYTES, LayerCache, index_keys, keys_then_scales,
                                           latent_entries, plain_block, split_kv)
from sluice_client.hand_off.settings import CONNECTOR
from sluice_client.vllm_connector.engine import specs_of

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SPLIT = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
_CPU = "CPU_ATTN"


class Permuted:
    """A block in the order of the CPU backend's kernels, which `order` undoes: [tokens][2 * head_dim] positions."""

    def __init__(self, order: np.ndarray):
        self._order = order

    def __call__(self, block: np.ndarray) -> np.ndarray:
        flat = np.ascontiguousarray(block).reshape(*block.shape[:2], -1)
        return flat[..., self._order.reshape(-1)].reshape(block.shape)


def measured_order(tokens: int, head_dim: int, store: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """Returns where a block of one head has each element: [tokens][K, then V] positions.

    `store(k, v)` writes k and v, [tokens, head_dim] of small whole numbers, as the engine does, and returns the block's
    elements in memory order. Raises ValueError if the engine does more than to reorder them.
    """
    count = 2 * tokens * head_dim
    digits = [np.arange(count) >> shift & 127 for shift in range(0, max(count - 1, 1).bit_length(), 7)]
    found = np.zeros(count, np.int64)
    for place, numbers in enumerate(digits):
        rows = numbers.reshape(tokens, 2 * head_dim)
        stored = store(rows[:, :head_dim].astype(np.float32), rows[:, head_dim:].astype(np.float32))
        found += stored.astype(np.int64) << 7 * place
    if not np.array_equal(np.sort(found), np.arange(count)):
        raise ValueError(f"{CONNECTOR}: vLLM's CPU backend stores K and V in a form that is not known")
    return np.argsort(found).reshape(tokens, 2 * head_dim)


def _cpu_order(tensor, isa: str) -> np.ndarray:
    """Measures the order of the CPU backend's blocks with its own operator."""
    import torch  # noqa: PLC0415
    from vllm import _custom_ops as ops  # noqa: PLC0415
    _, _, tokens, content = tensor.shape
    dim = content // 2

    def store(k, v):
        block = torch.zeros((1, 1, 2 * tokens, dim), dtype=tensor.dtype)
        keys, values = block.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            torch.from_numpy(k)[:, None].to(tensor.dtype), torch.from_numpy(v)[:, None].to(tensor.dtype), keys, values,
            torch.arange(tokens), isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")
        return block.float().numpy().reshape(-1)

    return measured_order(tokens, dim, store)


def _refused(name: str, what: str, remedy: str) -> ValueError:
    return ValueError(f"{CONNECTOR}: the cache of {name} is {what}, which it cannot send: {remedy}")


def _cache_of(name: str, layer: int, tensor, spec, attention, latent_rank: int) -> LayerCache:
    if tensor.ndim != 4:
        raise _refused(name, f"{tuple(tensor.shape)} and not [blocks, heads, tokens, content]", "take vLLM 0.30 or later")
    content = tensor.shape[3]
    bytes_of_token = content * tensor.dtype.itemsize
    if type(spec).__name__ == "MLAAttentionSpec":
        if bytes_of_token == INDEX_BYTES:
            return LayerCache(layer, "index", tensor, spec.block_size, keys_then_scales, index_keys)
        if bytes_of_token == ENTRY_BYTES or tensor.dtype.itemsize > 1:
            return LayerCache(layer, "latent", tensor, spec.block_size, plain_block, latent_entries(latent_rank))
        raise _refused(name, f"{bytes_of_token} bytes a token", "give --kv-cache-dtype auto or fp8_ds_mla")
    backend = attention.get_attn_backend().get_name()
    if content != 2 * spec.head_size or tensor.dtype.itemsize == 1:
        raise _refused(name, f"{content} elements of {tensor.dtype} a token", "give --kv-cache-dtype auto")
    if backend in _SPLIT:
        return LayerCache(layer, "kv", tensor, spec.block_size, plain_block, split_kv(spec.head_size))
    if backend == _CPU:
        order = Permuted(_cpu_order(tensor, attention.isa))
        return LayerCache(layer, "kv", tensor, spec.block_size, order, split_kv(spec.head_size))
    raise _refused(name, f"of the backend {backend}", f"give --attention-backend one of {', '.join(_SPLIT)}")


def layer_caches(kv_caches: dict, vllm_config, kv_cache_config) -> dict[str, list[LayerCache]]:
    """Returns the caches of each layer by the name with which vLLM saves it. Raises ValueError for unknown forms."""
    specs = specs_of(kv_cache_config)
    modules = vllm_config.compilation_config.static_forward_context
    config = vllm_config.model_config.hf_config
    layers = config.num_hidden_layers
    found: dict[int, list[LayerCache]] = {}
    names: dict[int, str] = {}
    for name, tensor in kv_caches.items():
        match = _LAYER.search(name)
        if match is None:
            raise _refused(name, "of no numbered layer", "take a decoder model")
        layer = int(match[1])
        if layer >= layers or name not in specs:
            continue  # Layers that draft tokens have caches of their own.
        cache = _cache_of(name, layer, tensor, specs[name], modules[name], getattr(config, "kv_lora_rank", 0))
        if cache.kind in (other.kind for other in found.get(layer, ())):
            raise _refused(name, f"the second of kind {cache.kind} in layer {layer}", "take a decoder model")
        found.setdefault(layer, []).append(cache)
        if cache.kind != "index":  # vLLM saves a layer by its attention, which comes after its indexer.
            names[layer] = name
    return {names[layer]: caches for layer, caches in found.items()}
