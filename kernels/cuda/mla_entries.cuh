// How a packed entry becomes 576 bf16 in shared memory, as the tensor cores read it.
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/mla_plan.cuh"

namespace sluice::kernels::cuda {

// A tile of 64 entries, or of 64 heads: 9 blocks of [64 rows][64] bf16, swizzled (TileDescriptor).
inline constexpr int kMlaWidth = kPackedRank + kPackedRope;
inline constexpr int kMlaColumnBlockBytes = 64 * 128;
inline constexpr int kMlaTileBytes = kMlaWidth / 64 * kMlaColumnBlockBytes;

// What a lane reads of an entry: 8 values from column Columns(lane) on, 8 from 128 columns further,
// and the scales of both.
struct RawEntry {
  uint2 values[2];
  float2 scales;

  __device__ static int Column(int lane) { return lane / 16 * 256 + lane % 16 * 8; }
  __device__ void Load(const char* entry, int lane) {
    values[0] = __ldg(reinterpret_cast<const uint2*>(entry + Column(lane)));
    values[1] = __ldg(reinterpret_cast<const uint2*>(entry + Column(lane) + 128));
    scales = __ldg(reinterpret_cast<const float2*>(entry + kPackedRank + lane / 16 * 8));
  }
};

// Two e4m3 values, bytes kFirst and kFirst + 1 of x, times 2^-120 as bf16: sign, exponent and
// mantissa move to their places, the exponent's bias stays. Subnormal values become subnormal.
template <int kFirst>
__device__ __forceinline__ uint32_t SpreadE4M3(uint32_t x) {
  const uint32_t high = __byte_perm(x, 0, kFirst == 0 ? 0x1404 : 0x3424);
  return (high >> 4 & 0x07f007f0u) | (high & 0x80008000u);
}

// A scale times 2^120 as a sum of two bf16, which keeps 16 bits of it, twice each.
struct PackedScale {
  __nv_bfloat162 high, low;

  __device__ explicit PackedScale(float scale) {
    const float x = scale * 0x1p120f;
    high = __floats2bfloat162_rn(x, x);
    const float rest = x - __low2float(high);
    low = __floats2bfloat162_rn(rest, rest);
  }
};

// The products, rounded once but for 2^-17 of them.
__device__ __forceinline__ uint32_t ScalePair(uint32_t pair, const PackedScale& scale) {
  const __nv_bfloat162 v = *reinterpret_cast<const __nv_bfloat162*>(&pair);
  const __nv_bfloat162 product = __hfma2(v, scale.high, __hmul2(v, scale.low));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// Four values of one scale.
__device__ __forceinline__ uint2 UnpackFour(uint32_t values, float scale) {
  uint32_t low, high;
  asm("{\n"
      ".reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(values));
  const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&low));
  const float2 y = __half22float2(*reinterpret_cast<const __half2*>(&high));
  return {PackBf16(x.x * scale, x.y * scale), PackBf16(y.x * scale, y.y * scale)};
}

// Eight values of one scale.
__device__ __forceinline__ uint4 Unpack(uint2 values, float scale) {
  const uint2 a = UnpackFour(values.x, scale), b = UnpackFour(values.y, scale);
  return {a.x, a.y, b.x, b.y};
}

// Offset of 16-byte piece `piece` (8 columns) of a tile's row.
__device__ __forceinline__ uint32_t MlaTileOffset(int row, int piece) {
  return static_cast<uint32_t>(piece / 8 * kMlaColumnBlockBytes + row * 128 +
                               ((piece % 8) ^ (row % 8)) * 16);
}

__device__ __forceinline__ void StoreShared(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Tiles of a group's lists, in order, as those who load them see them.
struct MlaTile {
  int row;
  int slot;
  int first;      // entry of the list
  int last;       // of the list, that the tile has; below `first`: there is no such tile
  bool is_first;  // of the row, in this group
};

class MlaTiles {
 public:
  __device__ MlaTiles(const MlaWalk& walk) : walk_(walk) {
    if (!walk_.done() && walk_.entries() == 0) walk_.NextFull();
  }
  __device__ MlaTile Next() {
    if (walk_.done()) return {0, 0, 0, -1, false};
    const int first = walk_.begin_entry() + tile_ * kMlaTileEntries;
    const int end = walk_.begin_entry() + walk_.entries();
    const MlaTile tile = {walk_.row(), walk_.slot(), first, min(first + kMlaTileEntries, end) - 1,
                          tile_ == 0 && walk_.piece() == walk_.first_piece()};
    ++tile_;
    if (first + kMlaTileEntries >= end) {
      tile_ = 0;
      walk_.NextFull();
    }
    return tile;
  }

 private:
  MlaWalk walk_;
  int tile_ = 0;
};

// Lane i < 16 of a warp: the number of the warp's i-th entry of a tile (past the last one, the last
// one again), and then its place in the cache, in entries from its base.
__device__ __forceinline__ int MlaNumber(const SparseMlaParams& p, const MlaTile& tile, int warp,
                                         int lane) {
  if (tile.last < tile.first) return 0;
  const int at = min(tile.first + warp * 16 + lane % 16, tile.last);
  return p.entries == nullptr ? at : __ldg(p.entries + tile.row * p.capacity + at);
}
__device__ __forceinline__ int MlaPlace(const PagedLatents& c, const MlaTile& tile, int number) {
  if (tile.last < tile.first) return 0;
  const int block = number / c.block_tokens;
  const int page = __ldg(c.block_table + tile.slot * c.table_stride + block);
  return page * c.block_tokens + (number - block * c.block_tokens);
}

}  // namespace sluice::kernels::cuda
