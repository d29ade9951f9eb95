// Tile registers of AMX, and numbers in parts for them. Compiled with AMX flags: internal linkage
// only.
#pragma once

#include <immintrin.h>

#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64;  // bytes of a tile's row

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};
};

// g++ 12 does not know that tile loads and ldtilecfg read memory: whatever was written to `data`
// must be there before them.
inline void Written(const void* data) { __asm__ volatile("" : : "r"(data) : "memory"); }

// Returns the bf16 value nearest to x, as a float. REQUIRES: |x| is finite.
inline __m512 HighPart(__m512 x) {
  const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  return _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(int32_t(0xFFFF0000))));
}

// Rounds to bf16: elements 0-15 from a, 16-31 from b.
inline __m512i PackBf16(__m512 a, __m512 b) { return (__m512i)_mm512_cvtne2ps_pbh(b, a); }

}  // namespace
}  // namespace sluice::kernels::cpu
