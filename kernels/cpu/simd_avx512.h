// AVX-512 as a path's vectors (simd_math.h). Compiled with AVX-512 flags: internal linkage only.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/simd_attention.h"
#include "kernels/cpu/transpose_avx512.h"

namespace sluice::kernels::cpu {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int kWidth = 16;

  // These tiles fit 32 registers.
  static constexpr int kQueryRows = 6;
  static constexpr int kScoreVectors = 2;
  static constexpr int kValueVectors = 4;
  static constexpr int kLevelHeads = 4;

  static F Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F Set1(float v) { return _mm512_set1_ps(v); }
  static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm512_div_ps(a, b); }
  static F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F Sqrt(F x) { return _mm512_sqrt_ps(x); }
  static F Max(F a, F b) { return _mm512_max_ps(a, b); }
  static F Min(F a, F b) { return _mm512_min_ps(a, b); }
  static F ZeroBelow(F x, float limit, F y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, Set1(limit), _CMP_NLT_UQ), y);
  }
  static F Round(F x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static F Pow2(F n) { return _mm512_scalef_ps(Set1(1.0f), n); }
  static F LoadBf16(const uint16_t* p) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
  }
  // As numbers of 16 bits with 5 of exponent and 10 of mantissa, e4m3 values are 2^8 times too
  // small, also where they are subnormal. (The code of NaN counts as 480.) Bit 14 is a copy of the
  // sign, which is in its place already.
  static constexpr float kSmallE4M3 = 256;
  static F LoadSmallE4M3(const uint8_t* p) {
    const __m256i v = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtph_ps(
        _mm256_and_si256(_mm256_slli_epi16(v, 7), _mm256_set1_epi16(int16_t(0xBFFF))));
  }
  static F LoadE4M3(const uint8_t* p) { return Mul(LoadSmallE4M3(p), Set1(kSmallE4M3)); }
  static void StoreBf16(uint16_t* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
  }
  static float Sum(F v) { return _mm512_reduce_add_ps(v); }
  static void Sum4(const F (&v)[4], float* out) {
    const F pairs01 = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const F pairs23 = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const F lanes = _mm512_add_ps(_mm512_shuffle_ps(pairs01, pairs23, 0x44),
                                  _mm512_shuffle_ps(pairs01, pairs23, 0xEE));
    const __m256 two =
        _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
  }
  static float Largest(F v) { return _mm512_reduce_max_ps(v); }

  // Turns 16 keys of `dim` bf16 into columns of floats, by 16 pairs of dimensions at a time.
  static void TransposeKeys(const uint16_t* keys, int64_t dim, float* out) {
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) TransposeBlock<32>(keys + d, dim, out + d * kChunk);
    if (d < dim) TransposeBlock<16>(keys + d, dim, out + d * kChunk);
  }

  template <int kDims>
  static void TransposeBlock(const uint16_t* keys, int64_t dim, float* out) {
    constexpr __mmask16 kPairs = static_cast<__mmask16>((1u << (kDims / 2)) - 1);
    __m512i a[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_epi32(kPairs, keys + i * dim);
    TransposeRows<kDims / 2>(a,
                             [out](int pair, __m512i of_keys) { StorePair(of_keys, out, pair); });
  }

  // Stores dimensions 2 * pair (low halves) and 2 * pair + 1 (high halves) of 16 keys.
  static void StorePair(__m512i pairs, float* out, int pair) {
    Store(out + 2 * pair * kChunk, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
    Store(out + (2 * pair + 1) * kChunk,
          _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xFFFF0000)))));
  }
};

}  // namespace
}  // namespace sluice::kernels::cpu
