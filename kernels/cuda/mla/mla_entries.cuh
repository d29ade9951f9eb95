// How packed entries become tiles of fp16 in shared memory, as the tensor cores read them.
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/common/attention_tile.cuh"
#include "kernels/cuda/mla/mla_plan.cuh"

namespace sluice::kernels::cuda {

// A tile of 64 entries, or of 64 heads: 9 blocks of [64 rows][64], swizzled (TileDescriptor): eight
// of latents in fp16 (those of queries come as bf16 and are made that in place), RoPE's in bf16.
inline constexpr int kMlaWidth = kPackedRank + kPackedRope;
inline constexpr int kMlaColumnBlockBytes = 64 * 128;
inline constexpr int kMlaUnpackWarps = 8;
inline constexpr int kMlaWarpEntries = kMlaTileEntries / kMlaUnpackWarps;
inline constexpr int kMlaPairs = kMlaWarpEntries / 2;  // of entries, of a warp and tile
inline constexpr int kMlaBatch = 2;                    // pairs that it unpacks at a time
inline constexpr int kMlaTileBytes = kMlaWidth / 64 * kMlaColumnBlockBytes;

// Four e4m3 values of one scale: fp16 has them exactly, the product is rounded once more.
__device__ __forceinline__ uint2 UnpackFour(uint32_t values, __half2 scale) {
  uint32_t low, high;
  asm("{\n"
      ".reg .b16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(values));
  const __half2 x = __hmul2(*reinterpret_cast<const __half2*>(&low), scale);
  const __half2 y = __hmul2(*reinterpret_cast<const __half2*>(&high), scale);
  return {*reinterpret_cast<const uint32_t*>(&x), *reinterpret_cast<const uint32_t*>(&y)};
}

__device__ __forceinline__ uint32_t PackFp16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
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

// Of a row as it came, piece `piece` of 32: half of a row's banks from where it would be as a
// tile's, in every other row, so that 4 pieces each of two neighbouring rows lie in all banks.
__device__ __forceinline__ uint32_t MlaRawOffset(int row, int piece) {
  return MlaTileOffset(row, piece ^ row % 2 * 4);
}

// One tile of a group's lists, as those who load it see it.
struct MlaTile {
  int row;  // -1: there is no such tile
  int slot;
  int first;      // entry of its list
  int end;        // of the piece
  bool is_first;  // the tile before it is of another row
  bool then;      // of the second of two lists
};

// The tiles of a group, in order, in shared memory. One lane writes tile n + kAhead once its warp
// has unpacked tile n. Another warp asks for it three tiles early, behind its wait for the
// consumers of tile n + 1, so after all warps have unpacked that; and what it displaces, tile n +
// kAhead - kRing, all have left by then.
struct MlaTiles {
  static constexpr uint32_t kRing = 8, kAhead = 6;

  MlaTile ring[kRing];  // tile n is ring[n % kRing]
  MlaPosition position;

  // To the first tile. By one lane, as Step().
  __device__ void Start(const SparseMlaParams& p, const MlaPosition& at) {
    MlaWalk walk(p, at);
    if (!walk.done() && walk.entries() == 0) walk.NextFull();
    Put(walk, 0, -1);
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
      Put(walk, n % kRing, last.row);
    }
  }

 private:
  __device__ void Put(const MlaWalk& walk, uint32_t into, int row_before) {
    position = walk.position();
    if (walk.done()) {
      ring[into].row = -1;
    } else {
      const int begin = walk.begin_entry();
      ring[into] = {
          walk.row(),       walk.slot(), begin, begin + walk.entries(), walk.row() != row_before,
          walk.IsOfSecond()};
    }
  }
};

// Four bytes from global to shared memory, if `valid`.
__device__ __forceinline__ void CopyAsync4(void* to, const void* from, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p cp.async.ca.shared.global [%0], [%1], 4;\n"
      "}" ::"r"(SharedAddress(to)),
      "l"(from), "r"(static_cast<int>(valid))
      : "memory");
}

// Where the entries of a warp's next tiles lie: their numbers and the pages of those, asked for
// tiles ahead. They land in shared memory: a register that a load is still to fill cannot even be
// moved before it is there. Of tiles n and n + 2 the second takes the place of the first.
struct MlaPlaces {
  int numbers[2][kMlaWarpEntries];
  int pages[2][kMlaWarpEntries];

  // Of the entry `lane` of tile n; past the tile's last one, the last one again. By all lanes,
  // those of [0, kMlaWarpEntries) count.
  __device__ __forceinline__ void AskNumber(const SparseMlaParams& p, const MlaTile& tile,
                                            uint32_t n, int warp, int lane) {
    const int at = min(tile.first + warp * kMlaWarpEntries + lane, tile.end - 1);
    const bool asks = lane < kMlaWarpEntries && tile.row >= 0;
    const int32_t* const list = tile.then ? p.then_entries : p.entries;
    int* const to = &numbers[n % 2][lane % kMlaWarpEntries];
    if (list == nullptr) {
      if (asks) *to = at;
    } else {
      CopyAsync4(to, list + tile.row * p.capacity + at, asks);
    }
  }
  // Once the number is there.
  __device__ __forceinline__ void AskPage(const PagedLatents& c, const MlaShape& shape,
                                          const MlaTile& tile, uint32_t n, int lane) {
    const int of = lane % kMlaWarpEntries;
    CopyAsync4(&pages[n % 2][of],
               c.block_table + tile.slot * c.table_stride + BlockOf(shape, numbers[n % 2][of]),
               lane < kMlaWarpEntries && tile.row >= 0);
  }
  // Once the page is there: the place in the cache, in entries from its base.
  __device__ __forceinline__ int Place(const PagedLatents& c, const MlaShape& shape, uint32_t n,
                                       int lane) const {
    const int number = numbers[n % 2][lane];
    return (pages[n % 2][lane] - BlockOf(shape, number)) * c.block_tokens + number;
  }

 private:
  static __device__ __forceinline__ int BlockOf(const MlaShape& shape, int number) {
    return static_cast<int>(__umulhi(static_cast<uint32_t>(number), shape.block_reciprocal));
  }
};

// Which part of a pair of entries a lane unpacks: of entry `entry` 16 values of each of two
// neighbouring scales, 128 apart. Every 4 lanes read 64 bytes, and every 8 write to all banks.
struct MlaLane {
  int entry;   // of {0, 1}
  int scales;  // lane that has the two scales, of pair 0
  // Offsets in a tile, of the warp's pair 0: of the first 16 values as they came, and of the first
  // 8 of them unpacked.
  uint32_t raw, tile;

  __device__ MlaLane(int warp, int lane) : entry(lane / 4 % 2), scales(lane / 16 * 16 + entry) {
    const int block = lane / 16 * 4 + lane / 8 % 2, chunk = lane % 4;
    raw = MlaRawOffset(warp * kMlaWarpEntries + entry, block * 4 + chunk);
    tile = MlaTileOffset(warp * kMlaWarpEntries + entry, block * 8 + chunk * 2);
  }
};

// Two neighbouring scales of entry lane % kMlaWarpEntries of a warp's, at lane / 16 * 2. `base`: of
// entry 0 of the cache, those scales.
__device__ __forceinline__ float2 LoadScales(const char* base, int place) {
  // Not by the read-only path: a transfer beside this kernel may bring them.
  return __ldcg(reinterpret_cast<const float2*>(base + int64_t{place} * kPackedEntryBytes));
}

__device__ __forceinline__ uint32_t ScalesOf(float2 scales) {
  return PackFp16(scales.x * kMlaUnit, scales.y * kMlaUnit);
}

// Copies a warp's entries into their rows of a tile: RoPE values, which are bf16 as they are, to
// their place, values to where the first half of the row will be (MlaRawOffset). Past L1, which has
// few lines beside this much shared memory: loads into registers need one each, and once there is
// none everything behind them in the pipe to shared memory waits too.
struct MlaCopies {
  const char* values[kMlaWarpEntries];
  const char* rope[kMlaWarpEntries / 4];

  // What can be worked out before the tile is free. Of lane i, `place` is that of entry
  // i % kMlaWarpEntries.
  __device__ __forceinline__ MlaCopies(const char* base, int place, int lane) {
    // Opaque, so that what is added to them is one multiplication's.
    const char* first = base + lane * 16;
    const char* first_rope = base + kPackedRank + 16 + lane % 8 * 16;
    asm volatile("" : "+l"(first), "+l"(first_rope));
#pragma unroll
    for (int e = 0; e < kMlaWarpEntries; ++e) values[e] = first + Offset(place, e);
#pragma unroll
    for (int i = 0; i < kMlaWarpEntries / 4; ++i) {
      rope[i] = first_rope + Offset(place, 4 * i + lane / 8);
    }
  }
  // `target`: of the tile.
  __device__ __forceinline__ void Start(uint32_t target, int warp, int lane) const {
    static_assert(kMlaWarpEntries == 8);  // so that entry e is row % 8 = e
    const uint32_t raw = target + MlaRawOffset(warp * kMlaWarpEntries, lane);
#pragma unroll
    for (int e = 0; e < kMlaWarpEntries; ++e) {
      CopyAsync16((raw ^ MlaRawOffset(e, 0) % 128) + static_cast<uint32_t>(e * 128), values[e],
                  true);
    }
    const uint32_t to =
        target + MlaTileOffset(warp * kMlaWarpEntries + lane / 8, kPackedRank / 8 + lane % 8);
#pragma unroll
    for (int i = 0; i < kMlaWarpEntries / 4; ++i) {
      CopyAsync16((to ^ MlaTileOffset(4 * i, 0) % 128) + static_cast<uint32_t>(i * 512), rope[i],
                  true);
    }
  }

 private:
  static __device__ __forceinline__ int64_t Offset(int place, int entry) {
    return int64_t{__shfl_sync(0xffffffffu, place, entry)} * kPackedEntryBytes;
  }
};

// The warp's entries on their way to L2: 128 bytes at a time, the last one's end too.
__device__ __forceinline__ void FetchEntries(const char* base, int place, int lane) {
  const char* const entry = base + int64_t{place} * kPackedEntryBytes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = min((lane / kMlaWarpEntries * 2 + i) * 128, kPackedEntryBytes - 16);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(entry + at));
  }
}

// By a warp: of all its lanes' copies, all but the newest kPending groups have landed.
template <int kPending>
__device__ __forceinline__ void WaitForWarpCopies() {
  WaitForCopies<kPending>();
  __syncwarp();
}

// Two entries of a warp.
struct MlaPair {
  uint4 values[2];

  // As pair `pair`. `raw`: the lane's address for pair 0. Entry 2 * pair is row % 8 = 2 * (pair %
  // 4) of 8 rows, which moves the piece.
  __device__ __forceinline__ void Load(uint32_t raw, int pair) {
    const uint32_t at =
        (raw ^ static_cast<uint32_t>(pair % 4 * 32)) + static_cast<uint32_t>(pair * 256);
    values[0] = LoadShared(at);
    values[1] = LoadShared(at + kMlaColumnBlockBytes);
  }

  // As pair `pair`. `tile`: the lane's address for pair 0; `scales`: of the lane. Entry 2 * pair is
  // row % 8 = 2 * (pair % 4) of 8 rows, which moves the chunk.
  __device__ __forceinline__ void Store(uint32_t tile, int pair, uint32_t scales) const {
    const uint32_t at =
        (tile ^ static_cast<uint32_t>(pair % 4 * 32)) + static_cast<uint32_t>(pair * 256);
    const __half2 of = *reinterpret_cast<const __half2*>(&scales);
    StoreChunk(at, values[0], __low2half2(of));
    StoreChunk(at + 2 * kMlaColumnBlockBytes, values[1], __high2half2(of));
  }

 private:
  static __device__ __forceinline__ void StoreChunk(uint32_t at, uint4 v, __half2 scale) {
    const uint2 a = UnpackFour(v.x, scale), b = UnpackFour(v.y, scale);
    StoreShared(at, {a.x, a.y, b.x, b.y});
    const uint2 c = UnpackFour(v.z, scale), d = UnpackFour(v.w, scale);
    StoreShared(at ^ 16, {c.x, c.y, d.x, d.y});
  }
  static __device__ __forceinline__ uint4 LoadShared(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
  }
};

}  // namespace sluice::kernels::cuda
