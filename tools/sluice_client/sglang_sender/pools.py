"""How SGLang's pools lie, and which of them can be sent.

A pool has a buffer [slots, heads, dim] for each layer, and a page is page_size slots in a row: MHATokenToKVPool has one
for K and one for V, of the rank's own heads; MLATokenToKVPool has latent entries. DSATokenToKVPool adds the indexer's
keys, [pages, page_size * 132 bytes]: all values of a page, then all scales.

Nothing here imports torch or SGLang, so that the layouts are tested without them: arrays of numpy will do.
"""

from sluice_client.hand_off.caches import (ENTRY_BYTES, INDEX_BYTES, KeysAndValues, LayerCache, index_keys,
                                           keys_then_scales, latent_entries, plain_block, transformed_index_keys)
from sluice_client.hand_off.sender import Cache
from sluice_client.hand_off.shape import EngineShape

ENGINE = "SGLang"
_MHA, _MLA, _DSA = "MHATokenToKVPool", "MLATokenToKVPool", "DSATokenToKVPool"


def refused(what: str, found: object, remedy: str) -> ValueError:
    """Returns the error for an engine whose caches cannot be sent."""
    return ValueError(f"sluice: {what} is {found}, whose caches cannot be sent: {remedy}")


def _paged(buffer, page_size: int):
    """Returns [slots, heads, dim] as [pages, heads, page_size, dim], without a copy."""
    pages = buffer.shape[0] // page_size
    shape, rows = (pages, page_size, *buffer.shape[1:]), buffer[:pages * page_size]
    return (rows.view(shape) if hasattr(rows, "data_ptr") else rows.reshape(shape)).swapaxes(1, 2)


def _check(pool) -> str:
    """Returns the pool's class, which is one of the three. Raises ValueError for others and for their other forms."""
    kind = type(pool).__name__
    if kind not in (_MHA, _MLA, _DSA):
        raise refused("the KV pool", kind, "take a model of one pool whose layers attend to everything, "
                      "and leave options that change its layout out")
    if getattr(pool, "layer_shard_enabled", False):
        raise refused("the KV pool", "divided by layers", "give each rank all layers")
    if kind == _MHA:
        if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
            raise refused("the layout of the KV pool", pool.kv_cache_layout, "take nhd")
        if pool.v_head_dim != pool.head_dim:
            raise refused("the head_dim of V", pool.v_head_dim, f"take a model whose V has that of K, {pool.head_dim}")
        if pool.k_buffer[0].dtype.itemsize == 1 or getattr(pool, "is_quantized_kv_cache", False):
            raise refused("--kv-cache-dtype", pool.dtype,
                          "give auto, since the decode node keeps K and V in 16 or 32 bits")
    elif pool.kv_buffer[0].dtype.itemsize == 1 and pool.kv_cache_dim != ENTRY_BYTES:
        raise refused("--kv-cache-dtype", f"{pool.dtype} of {pool.kv_cache_dim} bytes a token",
                      f"give auto, or a backend that keeps entries of {ENTRY_BYTES} bytes")
    return kind


def _index_cache(pool, local: int, layer: int, transformed: bool) -> LayerCache:
    buffer = pool.index_k_with_scale_buffer[local]
    if getattr(pool, "index_kpool", 1) != 1:
        raise refused("index_kpool", pool.index_kpool, "take a model whose index keys are one a token")
    if buffer.shape[0] == 0:
        raise refused(f"the indexer of layer {layer}", "another layer's", "take a model whose layers all have one")
    if pool.index_page_size != pool.page_size or buffer.shape[1] != pool.page_size * INDEX_BYTES:
        raise refused("a page of index keys", f"{buffer.shape[1]} bytes", f"take pages of {pool.index_page_size} tokens")
    paged = buffer.reshape(buffer.shape[0], 1, pool.page_size, INDEX_BYTES)
    return LayerCache(layer, "index", paged, pool.page_size, keys_then_scales,
                      transformed_index_keys if transformed else index_keys)


def pool_caches(pool, transformed: bool = False) -> list[Cache]:
    """Returns the caches of each layer. Raises ValueError for forms that cannot be sent.

    `transformed` says whether index keys have been through the Hadamard transform.
    """
    kind, page, found = _check(pool), pool.page_size, []
    for local in range(pool.layer_num):
        layer = pool.start_layer + local
        if kind == _MHA:
            found.append(KeysAndValues(*(LayerCache(layer, "kv", _paged(buffers[local], page), page)
                                         for buffers in (pool.k_buffer, pool.v_buffer))))
            continue
        found.append(LayerCache(layer, "latent", _paged(pool.kv_buffer[local], page), page, plain_block,
                                latent_entries(pool.kv_lora_rank)))
        if kind == _DSA:
            found.append(_index_cache(pool, local, layer, transformed))
    return found


def keys_transformed(modules) -> bool:
    """Returns whether the indexers among a model's modules transform their keys. SGLang's fused kernels do not, on which
    platform and settings decide. Raises ValueError if they differ.
    """
    found = {not (module.use_dsa_indexer_fusion or module.use_aiter_fused_fp8_writer)
             for module in modules if hasattr(module, "use_dsa_indexer_fusion")}
    if len(found) > 1:
        raise refused("the form of index keys", "not the same in all layers", "give all indexers the same settings")
    return found == {True}


def engine_shape(pool, model_config, ranks: int) -> EngineShape:
    """Returns the engine's shape, whose heads are divided by `ranks`. Raises ValueError for what cannot be sent."""
    latent = _check(pool) != _MHA
    config = model_config.hf_text_config
    if pool.start_layer != 0 or pool.layer_num != config.num_hidden_layers:
        raise refused("the number of layers in the KV pool", pool.layer_num,
                      f"give each rank all {config.num_hidden_layers} (no pipeline parallelism)")
    heads = 1 if latent else model_config.get_total_num_kv_heads()
    replicas = ranks if latent else max(1, ranks * pool.head_num // heads)
    if not latent and heads * replicas != ranks * pool.head_num:
        raise refused("the number of KV heads", heads, f"take ranks that divide it, found {ranks}")
    return EngineShape(
        engine=ENGINE, architecture=str(model_config.hf_config.model_type), layers=pool.layer_num, kv_heads=heads,
        head_dim=0 if latent else pool.head_dim, ranks=ranks, replicas=replicas, max_context=model_config.context_len)
