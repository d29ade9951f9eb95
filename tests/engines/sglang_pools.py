"""Run by SGLang's Python: its own latent pools, without a GPU, are read as the sender reads them."""

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel
from sluice.v1 import common_pb2
from sluice_client.sglang_sender import pools

BFLOAT16, FLOAT8 = common_pb2.ELEMENT_TYPE_BFLOAT16, common_pb2.ELEMENT_TYPE_FLOAT8_E4M3
PAGE = 64


def kind_of(name, dtype, parts):
    return common_pb2.CacheKind(name=name, element_type=dtype, heads=1, block_tokens=16, part_bytes=parts,
                                bytes_per_token=sum(parts))


def check_entries() -> None:
    """Pages 3 and 1 of a pool in 16 bits, from token 8 of the first on."""
    pool = MLATokenToKVPool(size=5 * PAGE, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64,
                            layer_num=2, device="cpu", enable_memory_saver=False)
    generator = torch.Generator().manual_seed(1)
    slots = torch.cat([torch.arange(3 * PAGE, 4 * PAGE), torch.arange(PAGE, PAGE + 16)])
    rows = torch.randn((len(slots), 1, 576), generator=generator).to(torch.bfloat16)
    pool.kv_buffer[1][slots] = rows
    cache = pools.pool_caches(pool)[1]
    part, = cache.read(kind_of("latent", BFLOAT16, [1152]), (3, 1), 8, PAGE + 16, None)
    assert (cache.layer, cache.kind) == (1, "latent")
    assert part.tobytes() == rows[8:].view(torch.int16).numpy().tobytes()


def check_index_keys() -> None:
    """SGLang's own move() puts keys and scales of a page, one token each, elsewhere, where they are found."""
    with get_parallel().override(attn_dcp_size=1, dcp_enabled=False):
        pool = DSATokenToKVPool(size=4 * PAGE, page_size=PAGE, kv_lora_rank=512, dtype=torch.float8_e4m3fn,
                                qk_rope_head_dim=64, layer_num=1, device="cpu", index_head_dim=128,
                                enable_memory_saver=False, kv_cache_dim=656)
    rng = np.random.default_rng(2)
    pool.kv_buffer[0][:] = torch.from_numpy(rng.integers(0, 120, tuple(pool.kv_buffer[0].shape), dtype=np.uint8))
    keys = rng.integers(0, 120, (PAGE, 128), dtype=np.uint8)
    scales = rng.random((PAGE, 1), dtype=np.float32)
    pool.index_k_with_scale_buffer[0][1] = torch.from_numpy(np.concatenate([keys.reshape(-1),
                                                                            scales.view(np.uint8).reshape(-1)]))
    order = rng.permutation(PAGE)
    pool.index_key_cache.move(torch.from_numpy(3 * PAGE + order), torch.arange(PAGE, 2 * PAGE))
    entries, index = pools.pool_caches(pool, transformed=True)
    values, sizes = index.read(kind_of("index", FLOAT8, [128, 4]), (3,), 0, PAGE, None)
    assert np.array_equal(values[order, 0], keys) and np.array_equal(sizes[order, 0].view(np.float32), scales)
    part, = entries.read(kind_of("latent", FLOAT8, [656]), (2,), 16, 32, None)
    assert part.tobytes() == pool.kv_buffer[0][2 * PAGE + 16:2 * PAGE + 32].numpy().tobytes()


if __name__ == "__main__":
    check_entries()
    check_index_keys()
    print("both pools are read")
