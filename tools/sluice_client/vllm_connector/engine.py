"""Checks at the start that an engine's caches are of a form that can be sent."""

from sluice_client.hand_off.settings import CONNECTOR
from sluice_client.hand_off.shape import EngineShape

_FULL, _LATENT = "FullAttentionSpec", "MLAAttentionSpec"


def _refused(what: str, found: object, remedy: str) -> ValueError:
    return ValueError(f"{CONNECTOR}: {what} is {found}, whose caches it cannot send: {remedy}")


def specs_of(kv_cache_config) -> dict[str, object]:
    """Returns the form of each layer's cache, by the layer's name, in the one group that vLLM's blocks are of."""
    groups = [g for g in kv_cache_config.kv_cache_groups if getattr(g, "enable_kv_transfer", True)]
    if len(groups) != 1:
        raise _refused("the number of KV cache groups", len(groups),
                       "give --disable-hybrid-kv-cache-manager, or a model whose layers attend alike")
    spec = groups[0].kv_cache_spec
    by_name = getattr(spec, "kv_cache_specs", None)
    return {name: by_name[name] if by_name else spec for name in groups[0].layer_names}


def check_engine(vllm_config, kv_cache_config) -> EngineShape:
    """Returns the engine's shape. Raises ValueError, which names what cannot be handed over."""
    parallel = vllm_config.parallel_config
    for name, remedy in (("pipeline_parallel_size", "divide the model by tensor parallelism alone"),
                         ("decode_context_parallel_size", "give 1"), ("prefill_context_parallel_size", "give 1")):
        if getattr(parallel, name, 1) > 1:
            raise _refused(name, getattr(parallel, name), remedy)
    specs = specs_of(kv_cache_config)
    if not specs:
        raise _refused("the number of layers with a cache", 0, "it is for decoder models")
    for layer, spec in specs.items():
        kind = type(spec).__name__
        if kind not in (_FULL, _LATENT):
            raise _refused(f"the cache of {layer}", kind, "only models whose layers attend to everything are known")
        if getattr(spec, "sliding_window", None):
            raise _refused(f"the sliding window of {layer}", spec.sliding_window, "take a model without one")
    main = next(iter(specs.values()))
    latent = any(type(spec).__name__ == _LATENT for spec in specs.values())
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if not latent and cache_dtype.startswith("fp8"):
        raise _refused("--kv-cache-dtype", cache_dtype, "give auto, since the decode node keeps K and V in 16 or 32 bits")
    ranks = parallel.tensor_parallel_size
    replicas = ranks if latent else getattr(kv_cache_config, "kv_tp_replicas", 1)
    model = vllm_config.model_config
    return EngineShape(
        engine="vLLM", architecture=str(getattr(model.hf_config, "model_type", "")), layers=model.hf_config.num_hidden_layers,
        kv_heads=1 if latent else main.num_kv_heads * ranks // replicas, head_dim=main.head_size,
        ranks=ranks, replicas=replicas, max_context=model.max_model_len)
