// Conversion of the packed form to panels of bf16. Compiled with AVX-512 BF16 flags: internal
// linkage only.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/transpose_avx512.h"
#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

// Converts 32 e4m3 values to bf16, exactly.
inline __m512i E4M3ToBf16(__m256i bytes) {
  const __m512i wide = _mm512_cvtepu8_epi16(bytes);
  const __m512i magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x7F));
  const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(wide, _mm512_set1_epi16(0x80)), 8);
  // 0 to 7 times 2^-9.
  const __m512i small = _mm512_broadcast_i32x4(
      _mm_setr_epi16(0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60));
  __m512i value = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  value = _mm512_mask_permutexvar_epi16(value, is_small, magnitude, small);
  const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7F));
  value = _mm512_mask_mov_epi16(value, is_nan, _mm512_set1_epi16(0x7FC0));
  return _mm512_or_si512(value, sign);
}

inline __m512 LowerToFloat(__m512i v) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(v)), 16));
}
inline __m512 UpperToFloat(__m512i v) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1)), 16));
}

// Puts 16 rows of 16 pairs, `stride` elements apart, in the panel's order: [pair][row].
inline void TransposePairs(const uint16_t* rows, int64_t stride, uint16_t* out) {
  __m512i a[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows + i * stride);
  TransposeRows<16>(
      a, [out](int pair, __m512i of_rows) { _mm512_storeu_si512(out + pair * 32, of_rows); });
}

}  // namespace
}  // namespace sluice::kernels::cpu
