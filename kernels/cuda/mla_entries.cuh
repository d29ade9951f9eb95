// How packed entries become tiles of bf16 in shared memory, as the tensor cores read them.
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/mla_plan.cuh"

namespace sluice::kernels::cuda {

// A tile of 64 entries, or of 64 heads: 9 blocks of [64 rows][64] bf16, swizzled (TileDescriptor).
inline constexpr int kMlaWidth = kPackedRank + kPackedRope;
inline constexpr int kMlaColumnBlockBytes = 64 * 128;
inline constexpr int kMlaUnpackWarps = 4;
inline constexpr int kMlaWarpEntries = kMlaTileEntries / kMlaUnpackWarps;
inline constexpr int kMlaBatch = 4;  // entries that a warp loads at a time
inline constexpr int kMlaTileBytes = kMlaWidth / 64 * kMlaColumnBlockBytes;

// A scale times 2^120 as a sum of two bf16, which keeps 16 bits of it, twice each. From 2^7 on it
// is infinite: after its norm no value of an entry comes near 448 * 2^7 (22.6 times the norm's
// weight at most), and what a sender makes up ends its own sequence, with logits that are not
// finite.
struct PackedScale {
  __nv_bfloat162 high, low;

  __device__ explicit PackedScale(float scale) {
    const float x = scale * 0x1p120f;
    high = __floats2bfloat162_rn(x, x);
    const float rest = x - __low2float(high);
    low = __floats2bfloat162_rn(rest, rest);
  }
};

// Two values times 2^-120; the products are rounded once but for 2^-17 of them.
__device__ __forceinline__ uint32_t ScalePair(uint32_t pair, const PackedScale& scale) {
  const __nv_bfloat162 v = *reinterpret_cast<const __nv_bfloat162*>(&pair);
  const __nv_bfloat162 product = __hfma2(v, scale.high, __hmul2(v, scale.low));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// Four e4m3 values of one scale. Sign, exponent and mantissa move to their places in bf16 (the
// upper bytes, then the lower ones), where the exponent's bias makes 2^-120 of each, of subnormal
// values too.
__device__ __forceinline__ uint2 UnpackFour(uint32_t values, const PackedScale& scale) {
  const uint32_t upper = (values & 0x80808080u) | (values >> 4 & 0x07070707u);
  const uint32_t lower = values << 4 & 0xf0f0f0f0u;
  return {ScalePair(__byte_perm(lower, upper, 0x5140), scale),
          ScalePair(__byte_perm(lower, upper, 0x7362), scale)};
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

// One tile of a group's lists, as those who load it see it.
struct MlaTile {
  int row;  // -1: there is no such tile
  int slot;
  int first;      // entry of its list
  int end;        // of the piece
  bool is_first;  // of the row, in this group
  bool then;      // of the second of two lists
};

// The tiles of a group, in order; a warp's own, in shared memory: in registers it would be in the
// way of entries.
struct MlaTiles {
  static constexpr int kRing = 4;

  MlaTile ring[kRing];  // tile n is ring[n % kRing], of the last kRing ones
  MlaPosition position;

  // To the first tile. By one lane, as Step().
  __device__ void Start(const SparseMlaParams& p, const MlaPosition& at) {
    MlaWalk walk(p, at);
    if (!walk.done() && walk.entries() == 0) walk.NextFull();
    Put(walk, 0);
  }
  // Tile n follows tile n - 1.
  __device__ void Step(const SparseMlaParams& p, uint32_t n) {
    const MlaTile& last = ring[(n - 1) % kRing];
    MlaTile& tile = ring[n % kRing];
    if (last.row < 0) {
      tile.row = -1;
    } else if (last.first + kMlaTileEntries < last.end) {
      tile = {last.row, last.slot, last.first + kMlaTileEntries, last.end, false, last.then};
    } else {
      MlaWalk walk(p, position);
      walk.NextFull();
      Put(walk, n % kRing);
    }
  }

 private:
  __device__ void Put(const MlaWalk& walk, uint32_t into) {
    position = walk.position();
    if (walk.done()) {
      ring[into].row = -1;
    } else {
      const int begin = walk.begin_entry();
      ring[into] = {walk.row(),
                    walk.slot(),
                    begin,
                    begin + walk.entries(),
                    walk.piece() == walk.first_piece(),
                    walk.IsOfSecond()};
    }
  }
};

// Of the entry of lane i % 16 of a warp: its number (past the tile's last one, the last one again);
// then its page; then its place in the cache, in entries from its base. Each is asked for a tile
// before the next needs it.
__device__ __forceinline__ int MlaNumber(const SparseMlaParams& p, const MlaTile& tile, int warp,
                                         int lane) {
  if (tile.row < 0) return 0;
  const int at = min(tile.first + warp * kMlaWarpEntries + lane % kMlaWarpEntries, tile.end - 1);
  const int32_t* const list = tile.then ? p.then_entries : p.entries;
  return list == nullptr ? at : __ldg(list + tile.row * p.capacity + at);
}
__device__ __forceinline__ int MlaPage(const PagedLatents& c, const MlaShape& shape,
                                       const MlaTile& tile, int number) {
  if (tile.row < 0) return 0;
  const auto block =
      static_cast<int>(__umulhi(static_cast<uint32_t>(number), shape.block_reciprocal));
  return __ldg(c.block_table + tile.slot * c.table_stride + block);
}
__device__ __forceinline__ int MlaPlace(const PagedLatents& c, const MlaShape& shape, int number,
                                        int page) {
  const auto block =
      static_cast<int>(__umulhi(static_cast<uint32_t>(number), shape.block_reciprocal));
  return page * c.block_tokens + number - block * c.block_tokens;
}

// Four entries of a warp, on their way: 16 values a lane, and of entry lane % 4 the scale of 128.
struct MlaBatch {
  uint4 values[kMlaBatch];
  float scale;

  // `place`: of lane first + i, that of entry i.
  __device__ __forceinline__ void Load(const char* base, int place, int first, int lane) {
#pragma unroll
    for (int i = 0; i < kMlaBatch; ++i) {
      const int of = __shfl_sync(0xffffffffu, place, first + i);
      values[i] = LoadOnce(base + int64_t{of} * kPackedEntryBytes + lane * 16);
    }
    const int of = __shfl_sync(0xffffffffu, place, first + lane % kMlaBatch);
    scale = __ldg(reinterpret_cast<const float*>(base + int64_t{of} * kPackedEntryBytes +
                                                 kPackedRank + lane / 8 * 4));
  }

  // To rows [row, row + kMlaBatch) of the tile at `target`. Of a lane's two pieces of 16 bytes,
  // lanes 4-7 of 8 store the second one first: so every 8 lanes write to all banks.
  __device__ __forceinline__ void Store(uint32_t target, int row, int lane) {
    const bool swap = (lane & 4) != 0;
    const int piece = 2 * lane + (swap ? 1 : 0);
#pragma unroll
    for (int i = 0; i < kMlaBatch; ++i) {
      const PackedScale of(__shfl_sync(0xffffffffu, scale, (lane & 24) + i));
      const uint4 v = values[i];
      const uint2 a = UnpackFour(swap ? v.z : v.x, of), b = UnpackFour(swap ? v.w : v.y, of);
      StoreShared(target + MlaTileOffset(row + i, piece), {a.x, a.y, b.x, b.y});
      const uint2 c = UnpackFour(swap ? v.x : v.z, of), d = UnpackFour(swap ? v.y : v.w, of);
      StoreShared(target + MlaTileOffset(row + i, piece ^ 1), {c.x, c.y, d.x, d.y});
    }
  }

 private:
  static __device__ __forceinline__ uint4 LoadOnce(const char* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
  }
};

}  // namespace sluice::kernels::cuda
