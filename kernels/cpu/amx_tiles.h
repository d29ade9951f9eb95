// Tile registers of AMX. Compiled with AMX flags: internal linkage only.
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

}  // namespace
}  // namespace sluice::kernels::cpu
