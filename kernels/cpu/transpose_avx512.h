// Transposes 16 rows of 32-bit elements, such as pairs of bf16, in registers. The file is for
// sources compiled for AVX-512.
#pragma once

#include <immintrin.h>

namespace sluice::kernels::cpu {
namespace {

// Calls put(column, rows) for the first `kColumns`, 8 or 16, columns of `a`, whose vectors are the
// rows. Overwrites `a`.
template <int kColumns, typename Put>
inline void TransposeRows(__m512i (&a)[16], Put put) {
  __m512i b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // Lane l of a[4 i + c] holds column 4 l + c of rows 4 i .. 4 i + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
    const __m512i odd01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xDD);
    const __m512i even23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    const __m512i odd23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xDD);
    put(c, _mm512_shuffle_i32x4(even01, even23, 0x88));
    put(4 + c, _mm512_shuffle_i32x4(odd01, odd23, 0x88));
    if constexpr (kColumns == 16) {
      put(8 + c, _mm512_shuffle_i32x4(even01, even23, 0xDD));
      put(12 + c, _mm512_shuffle_i32x4(odd01, odd23, 0xDD));
    }
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
