"""Which of SGLang's pools can be sent, and how the sender reads them."""

import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import sglang_stand_in as stand_in
from fake_node import DIM, HEADS, LAYERS
from sluice.v1 import common_pb2
from sluice_client import latent
from test_sglang_sender import loaded  # noqa: F401 - a fixture of every test here

from sluice_client.sglang_sender import pools  # noqa: E402


@pytest.mark.parametrize("change, words", [
    (lambda pool: setattr(pool, "kv_cache_layout", "hnd"), "layout"),
    (lambda pool: setattr(pool, "v_head_dim", 8), "head_dim"),
    (lambda pool: setattr(pool, "start_layer", 1), "layers"),
    (lambda pool: setattr(pool, "layer_shard_enabled", True), "layers"),
    (lambda pool: setattr(pool, "k_buffer", [a.astype(np.uint8) for a in pool.k_buffer]), "--kv-cache-dtype"),
    (lambda pool: setattr(pool, "__class__", type("SWAKVPool", (type(pool),), {})), "SWAKVPool")])
def test_pools_that_cannot_be_sent_are_refused(change, words):
    pool = stand_in.MHATokenToKVPool(LAYERS, HEADS, DIM, 4)
    change(pool)
    with pytest.raises(ValueError, match=words):
        stand_in.Scheduler(pool, LAYERS, HEADS)


@pytest.mark.parametrize("name", ["pp_size", "attn_cp_size", "attn_dcp_size"])
def test_other_parallelism_and_windows_are_refused(name, monkeypatch):
    pool = stand_in.MHATokenToKVPool(LAYERS, HEADS, DIM, 4)
    with pytest.raises(ValueError, match="sliding window"):
        stand_in.Scheduler(pool, LAYERS, HEADS, sliding_window_size=64)
    monkeypatch.setattr(sys.modules["sglang.srt.runtime_context"].get_parallel(), name, 2)
    with pytest.raises(ValueError, match=name):
        stand_in.Scheduler(pool, LAYERS, HEADS)


def kind_of(name, dtype, parts):
    return common_pb2.CacheKind(name=name, element_type=dtype, heads=1, block_tokens=8, part_bytes=parts,
                                bytes_per_token=sum(parts))


def test_latent_pools_have_entries_of_pages():
    rng = np.random.default_rng(7)
    pool = stand_in.MLATokenToKVPool(2, 8, 4, page_size=16, pages=5, dtype=ml_dtypes.bfloat16)
    pool.kv_buffer[1][:] = rng.standard_normal(pool.kv_buffer[1].shape).astype(ml_dtypes.bfloat16)
    found = pools.pool_caches(pool)
    assert [(c.layer, c.kind) for c in found] == [(0, "latent"), (1, "latent")]
    part, = found[1].read(kind_of("latent", common_pb2.ELEMENT_TYPE_BFLOAT16, [24]), (3, 1), 8, 24, None)
    assert part.tobytes() == pool.kv_buffer[1][56:64].tobytes() + pool.kv_buffer[1][16:24].tobytes()
    fp8 = stand_in.MLATokenToKVPool(1, 512, 64, 64, 2, np.uint8)
    with pytest.raises(ValueError, match="--kv-cache-dtype"):
        pools.pool_caches(fp8)


@pytest.mark.parametrize("transformed", [False, True])
def test_packed_entries_and_index_keys(transformed):
    rng = np.random.default_rng(8)
    pool = stand_in.DSATokenToKVPool(1, 512, 64, page_size=64, pages=3, dtype=np.uint8, entry=656)
    pool.kv_buffer[0][:] = rng.integers(0, 255, pool.kv_buffer[0].shape)
    keys = rng.standard_normal((64, 128)).astype(np.float32)
    values, scales = latent.quantise(latent.hadamard(keys) if transformed else keys)
    pool.index_k_with_scale_buffer[0][2] = np.concatenate([values.reshape(-1), scales.reshape(-1).view(np.uint8)])
    entries, index = pools.pool_caches(pool, transformed)
    float8 = common_pb2.ELEMENT_TYPE_FLOAT8_E4M3
    part, = entries.read(kind_of("latent", float8, [656]), (2,), 8, 16, None)
    assert part.tobytes() == pool.kv_buffer[0][2 * 64 + 8:2 * 64 + 16].tobytes()
    with pytest.raises(ValueError, match="--kv-dtype fp8"):
        entries.read(kind_of("latent", common_pb2.ELEMENT_TYPE_BFLOAT16, [1152]), (2,), 8, 16, None)
    plain, = index.read(kind_of("index", common_pb2.ELEMENT_TYPE_FLOAT32, [512]), (2,), 0, 64, None)
    assert np.abs(plain.view(np.float32).reshape(64, 128) - keys).max() < 0.2
    packed = index.read(kind_of("index", float8, [128, 4]), (2,), 0, 64, None)
    if transformed:  # as SGLang has them
        assert packed[0].tobytes() == values.tobytes() and packed[1].tobytes() == scales.tobytes()
    else:
        back = latent.hadamard(packed[0].reshape(64, 128).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
                               * packed[1].reshape(64, 4).view(np.float32))
        assert np.abs(back - keys).max() < 0.3


def test_the_form_of_index_keys_is_what_the_indexers_say():
    def indexer(fused):
        return SimpleNamespace(use_dsa_indexer_fusion=fused, use_aiter_fused_fp8_writer=False)
    assert pools.keys_transformed([object(), indexer(False)]) and not pools.keys_transformed([indexer(True)])
    with pytest.raises(ValueError, match="index keys"):
        pools.keys_transformed([indexer(True), indexer(False)])
    pool = stand_in.DSATokenToKVPool(1, 512, 64, 64, 3, np.uint8, entry=656)
    pool.index_kpool = 4
    with pytest.raises(ValueError, match="index_kpool"):
        pools.pool_caches(pool)
    pool.index_kpool, pool.index_k_with_scale_buffer = 1, [np.zeros((0, 64 * 132), np.uint8)]
    with pytest.raises(ValueError, match="indexer"):
        pools.pool_caches(pool)
