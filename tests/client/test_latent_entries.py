"""The bytes of latent caches as the client packs them (kernels/latent_params.h)."""

import ml_dtypes
import numpy as np
import pytest
from sluice.v1 import common_pb2
from sluice_client import latent, layout

TOKENS, BLOCK = 2 * 16 + 5, 16
FLOAT8 = common_pb2.ELEMENT_TYPE_FLOAT8_E4M3


def kind(name, element_type, part_bytes):
    return common_pb2.CacheKind(name=name, element_type=element_type, heads=1, block_tokens=BLOCK,
                                part_bytes=part_bytes, bytes_per_token=sum(part_bytes))


def values(seed, dim):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((TOKENS, dim)) * rng.uniform(0.01, 30, (TOKENS, 1))).astype(np.float32)


def value_of(byte):
    """Returns the values of e4m3, by its definition."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 0xF, byte & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([value_of(b) for b in range(256)])


NUMBERS = E4M3[[b for b in range(256) if b & 0x7F != 0x7F]]


def errors(scale, exact):
    """Returns the error of each value's nearest code, in units of the scale."""
    return np.abs(exact.astype(np.float64)[:, None] / scale - NUMBERS).min(axis=1)


def check_quantised(codes, scale, exact):
    """Each code is the nearest to its value, and the scale is the best of eight in the octave above the least one."""
    least = np.float32(np.abs(exact).max()) / np.float32(448)
    scales = least * np.float32(2) ** (np.arange(8, dtype=np.float32) / 8)
    squares = [np.square(s * errors(s, exact)).sum() for s in scales]
    assert scale == pytest.approx(scales[np.argmin(squares)], rel=1e-6)
    np.testing.assert_allclose(np.abs(exact.astype(np.float64) / scale - E4M3[codes]), errors(scale, exact),
                               rtol=1e-5, atol=1e-9)


def test_a_packed_entry_is_values_scales_and_rope():
    rank, rope = values(1, 512), values(2, 64)
    rank[7] = 0
    rank[8, 128:256] = 0
    payload = layout.pack(kind("latent", FLOAT8, [656]), latent.entry_parts(kind("latent", FLOAT8, [656]), rank, rope))
    assert len(payload) == TOKENS * 656
    for token in range(TOKENS):  # with one head and one part entries lie one after the other
        entry = payload[token * 656:(token + 1) * 656]
        codes = np.frombuffer(entry[:512], np.uint8)
        scales = np.frombuffer(entry[512:528], np.float32)
        for group in range(4):
            at = slice(128 * group, 128 * (group + 1))
            if not rank[token, at].any():
                assert scales[group] == 1 and not codes[at].any()
            else:
                check_quantised(codes[at], scales[group], rank[token, at])
        assert entry[528:] == rope[token].astype(ml_dtypes.bfloat16).tobytes()


def test_packed_index_keys_are_transformed_and_their_scales_lie_behind_the_blocks_keys():
    keys, packed = values(3, 128), kind("index", FLOAT8, [128, 4])
    payload = layout.pack(packed, latent.index_parts(packed, keys))
    assert len(payload) == TOKENS * 132
    signs = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(128)] for i in range(128)])
    exact = keys.astype(np.float64) @ signs / np.sqrt(128)
    for begin in range(0, TOKENS, BLOCK):
        size = min(BLOCK, TOKENS - begin)
        block = payload[begin * 132:(begin + size) * 132]
        codes = np.frombuffer(block[:size * 128], np.uint8).reshape(size, 128)
        scales = np.frombuffer(block[size * 128:], np.float32)
        for i in range(size):
            assert scales[i] == pytest.approx(np.abs(exact[begin + i]).max() / 448, rel=1e-5)
            # The transform is in float32, so a value next to a tie may go either way.
            off = np.abs(exact[begin + i] / scales[i] - E4M3[codes[i]])
            assert (off <= np.maximum(np.abs(exact[begin + i] / scales[i]) / 16, 2.0**-10) * 1.001).all()


@pytest.mark.parametrize("element, dtype", [(common_pb2.ELEMENT_TYPE_FLOAT32, np.float32),
                                            (common_pb2.ELEMENT_TYPE_BFLOAT16, ml_dtypes.bfloat16)])
def test_other_forms_are_the_elements_themselves(element, dtype):
    rank, rope, keys = values(4, 512), values(5, 64), values(6, 128)
    size = np.dtype(dtype).itemsize
    of_entries, of_keys = kind("latent", element, [576 * size]), kind("index", element, [128 * size])
    assert layout.pack(of_entries, latent.entry_parts(of_entries, rank, rope)) == \
        np.concatenate([rank, rope], axis=1).astype(dtype).tobytes()
    assert layout.pack(of_keys, latent.index_parts(of_keys, keys)) == keys.astype(dtype).tobytes()
