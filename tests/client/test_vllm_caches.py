"""How vLLM's caches lie, and which forms the connector for vLLM refuses."""

import ml_dtypes
import numpy as np
import pytest
import vllm_stand_in as stand_in
from sluice.v1 import common_pb2
from sluice_client import latent

stand_in.install()

from sluice_client.vllm_connector import caches  # noqa: E402


def kind_of(name, heads, dtype, parts):
    return common_pb2.CacheKind(name=name, element_type=dtype, heads=heads, block_tokens=8, part_bytes=parts,
                                bytes_per_token=sum(parts))


def test_a_permuted_block_is_measured_and_undone():
    rng = np.random.default_rng(5)
    tokens, dim = 32, 8
    shuffle = rng.permutation(2 * tokens * dim)

    def store(k, v):
        return np.concatenate([k.reshape(-1), v.reshape(-1)])[shuffle]

    order = caches.Permuted(caches.measured_order(tokens, dim, store))
    k, v = rng.standard_normal((2, tokens, dim)).astype(np.float32)
    block = store(k, v).reshape(1, 1, tokens, 2 * dim)
    assert np.array_equal(order(block)[0, 0], np.concatenate([k, v], axis=1))
    with pytest.raises(ValueError, match="CPU backend"):
        caches.measured_order(tokens, dim, lambda k, v: store(k, v) // 2)


def test_kernels_may_have_smaller_blocks_than_the_scheduler():
    rng = np.random.default_rng(6)
    tensor = rng.standard_normal((12, 2, 4, 6)).astype(np.float32)
    cache = caches.LayerCache(0, "kv", tensor, 16, caches.plain_block, caches.split_kv(3))
    kind = kind_of("kv", 2, common_pb2.ELEMENT_TYPE_FLOAT32, [12, 12])
    k, v = cache.read(kind, (2, 0), 6, 22, None)
    flat = tensor.transpose(0, 2, 1, 3).reshape(-1, 2, 6)  # scheduler's block b: tokens 16 b ..
    rows = np.concatenate([flat[32 + 6:48], flat[:6]])
    assert np.array_equal(k.view(np.float32).reshape(-1, 2, 3), rows[..., :3])
    assert np.array_equal(v.view(np.float32).reshape(-1, 2, 3), rows[..., 3:])


def test_latent_entries_and_index_keys():
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((4, 1, 16, 12)).astype(ml_dtypes.bfloat16)
    plain = kind_of("latent", 1, common_pb2.ELEMENT_TYPE_BFLOAT16, [24])
    cache = caches.LayerCache(0, "latent", rows, 16, caches.plain_block, caches.latent_entries(8))
    found, = cache.read(plain, (3,), 0, 16, None)
    assert found.tobytes() == rows[3].tobytes()
    packed = rng.integers(0, 255, (4, 1, 16, 656)).astype(np.uint8)
    cache = caches.LayerCache(0, "latent", packed, 16, caches.plain_block, caches.latent_entries(512))
    found, = cache.read(kind_of("latent", 1, common_pb2.ELEMENT_TYPE_FLOAT8_E4M3, [656]), (1,), 8, 16, None)
    assert found.tobytes() == packed[1, 0, 8:].tobytes()
    with pytest.raises(ValueError, match="--kv-dtype fp8"):
        cache.read(plain, (1,), 8, 16, None)
    # A block of index keys: all values, then all scales.
    keys = rng.standard_normal((16, 128)).astype(np.float32)
    values, scales = latent.quantise(keys)
    block = np.concatenate([values.reshape(-1), scales.reshape(-1).view(np.uint8)]).reshape(1, 1, 16, 132)
    cache = caches.LayerCache(0, "index", block, 16, caches.keys_then_scales, caches.index_keys)
    kind = kind_of("index", 1, common_pb2.ELEMENT_TYPE_FLOAT32, [512])
    found, = cache.read(kind, (0,), 0, 16, None)
    expected = values.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    assert np.array_equal(found.view(np.float32).reshape(16, 128), expected)


@pytest.mark.parametrize("backend, shape, dtype, words", [
    ("ROCM_ATTN", (4, 3, 16, 8), np.float32, "backend"), ("FLASH_ATTN", (4, 3, 16, 9), np.float32, "elements"),
    ("FLASH_ATTN", (4, 3, 16, 8), np.uint8, "elements"), ("FLASH_ATTN", (2, 4, 3, 16, 4), np.float32, "tokens, content")])
def test_unknown_layouts_are_refused(backend, shape, dtype, words):
    vllm_config, cache_config = stand_in.config(1, {}, backend=backend)
    with pytest.raises(ValueError, match="SluiceConnector") as error:
        caches.layer_caches({"model.layers.0.self_attn.attn": np.zeros(shape, dtype)}, vllm_config, cache_config)
    assert words in str(error.value)


def test_layers_that_draft_are_passed_over():
    vllm_config, cache_config = stand_in.config(2, {})
    vllm_config.model_config.hf_config.num_hidden_layers = 1
    cache = np.zeros((4, 3, 16, 8), np.float32)
    found = caches.layer_caches({name: cache for name in cache_config.kv_cache_groups[0].layer_names}, vllm_config,
                                cache_config)
    assert list(found) == ["model.layers.0.self_attn.attn"]
