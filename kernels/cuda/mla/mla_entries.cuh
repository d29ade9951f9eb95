// The conversion of packed entries into tiles of fp16 in shared memory, as the tensor cores read
// them.
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/common/attention_tile.cuh"
#include "kernels/cuda/common/float8.cuh"
#include "kernels/cuda/mla/mla_plan.cuh"

namespace sluice::kernels::cuda {

// A tile of 64 entries, or of 64 heads, is 9 blocks of [64 rows][64], swizzled (TileDescriptor).
// Eight blocks hold latents in fp16 (those of queries arrive as bf16 and are converted in place),
// and the last holds RoPE values in bf16.
inline constexpr int kMlaWidth = kPackedRank + kPackedRope;
inline constexpr int kMlaColumnBlockBytes = 64 * 128;
inline constexpr int kMlaUnpackWarps = 8;
inline constexpr int kMlaWarpEntries = kMlaTileEntries / kMlaUnpackWarps;
inline constexpr int kMlaPairs = kMlaWarpEntries / 2;  // pairs of entries of a warp and tile
inline constexpr int kMlaBatch = 2;                    // pairs that it unpacks at a time
inline constexpr int kMlaTileBytes = kMlaWidth / 64 * kMlaColumnBlockBytes;

// Converts four e4m3 values of one scale. fp16 holds the values exactly, and the product is
// rounded once more.
__device__ __forceinline__ uint2 UnpackFour(uint32_t values, __half2 scale) {
  const uint2 pairs = WidenE4M3(values);
  const __half2 x = __hmul2(*reinterpret_cast<const __half2*>(&pairs.x), scale);
  const __half2 y = __hmul2(*reinterpret_cast<const __half2*>(&pairs.y), scale);
  return {*reinterpret_cast<const uint32_t*>(&x), *reinterpret_cast<const uint32_t*>(&y)};
}

__device__ __forceinline__ uint32_t PackFp16(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Returns the offset of 16-byte piece `piece` (8 columns) of a tile's row.
__device__ __forceinline__ uint32_t MlaTileOffset(int row, int piece) {
  return static_cast<uint32_t>(piece / 8 * kMlaColumnBlockBytes + row * 128 +
                               ((piece % 8) ^ (row % 8)) * 16);
}

__device__ __forceinline__ void StoreShared(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Returns the offset of piece `piece` of 32 of a row in its raw form. In every other row a piece
// lies half of a row's banks away from its position in the tile, so that 4 pieces each of two
// neighbouring rows lie in all banks.
__device__ __forceinline__ uint32_t MlaRawOffset(int row, int piece) {
  return MlaTileOffset(row, piece ^ row % 2 * 4);
}

// One tile of a group's lists, as the warps that load it see it.
struct MlaTile {
  int row;  // -1 if there is no such tile
  int slot;
  int first;      // first entry, in its list
  int end;        // end of the piece
  bool is_first;  // the tile before it belongs to another row
  bool then;      // the tile is of the second of two lists
  bool arrives;   // entries of the tile may be on their way (SparseMlaParams::then_arrives)
};

// The tiles of a group, in order, in shared memory. One lane writes tile n + kAhead once its warp
// has unpacked tile n. Another warp reads a tile's record three tiles early, behind its wait for
// the consumers of tile n + 1, and so after all warps have unpacked that. All warps have then
// left tile n + kAhead - kRing, whose record is overwritten.
struct MlaTiles {
  static constexpr uint32_t kRing = 8, kAhead = 6;

  MlaTile ring[kRing];  // tile n is ring[n % kRing]
  MlaPosition position;

  // Makes the first tile. One lane calls it, as it does Step().
  __device__ void Start(const SparseMlaParams& p, const MlaPosition& at) {
    MlaWalk walk(p, at);
    if (!walk.done() && walk.entries() == 0) walk.NextFull();
    Put(p, walk, 0, -1);
  }
  // Makes tile n, which follows tile n - 1.
  __device__ void Step(const SparseMlaParams& p, uint32_t n) {
    const MlaTile& last = ring[(n - 1) % kRing];
    MlaTile& tile = ring[n % kRing];
    if (last.row < 0) {
      tile.row = -1;
    } else if (last.first + kMlaTileEntries < last.end) {
      tile = {last.row,  last.slot,   last.first + kMlaTileEntries, last.end, false,
              last.then, last.arrives};
    } else {
      MlaWalk walk(p, position);
      walk.NextFull();
      Put(p, walk, n % kRing, last.row);
    }
  }

 private:
  __device__ void Put(const SparseMlaParams& p, const MlaWalk& walk, uint32_t into,
                      int row_before) {
    position = walk.position();
    if (walk.done()) {
      ring[into].row = -1;
    } else {
      const int begin = walk.begin_entry(), row = walk.row();
      const bool follows = p.then_arrives && row > 0 && p.slots[row - 1] == walk.slot();
      ring[into] = {row,
                    walk.slot(),
                    begin,
                    begin + walk.entries(),
                    row != row_before,
                    walk.IsOfSecond(),
                    follows || walk.IsOfSecond()};
    }
  }
};

// Copies four bytes from global to shared memory, if `valid`.
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

// The locations of the entries of a warp's next tiles: the entries' numbers and the pages of
// those, which are loaded tiles ahead. They land in shared memory, because a register that a load
// is still to fill cannot even be moved before the load completes. Tile n + 2 overwrites tile n.
struct MlaPlaces {
  int numbers[2][kMlaWarpEntries];
  int pages[2][kMlaWarpEntries];

  // Starts loading the number of entry `lane` of tile n; past the tile's last entry, the last
  // one's again. All lanes call it, and lanes [0, kMlaWarpEntries) count.
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
  // Starts loading the page. REQUIRES: the number has arrived.
  __device__ __forceinline__ void AskPage(const PagedLatents& c, const MlaShape& shape,
                                          const MlaTile& tile, uint32_t n, int lane) {
    const int of = lane % kMlaWarpEntries;
    CopyAsync4(&pages[n % 2][of],
               c.block_table + tile.slot * c.table_stride + BlockOf(shape, numbers[n % 2][of]),
               lane < kMlaWarpEntries && tile.row >= 0);
  }
  // Returns the place in the cache, in entries from its base. REQUIRES: the page has arrived.
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

// The part of a pair of entries that a lane unpacks: 16 values each of two neighbouring scales,
// 128 apart, of entry `entry`. Every 4 lanes read 64 bytes, and every 8 write to all banks.
struct MlaLane {
  int entry;   // 0 or 1
  int scales;  // lane that has the two scales of pair 0
  // Offsets in a tile for the warp's pair 0: the first 16 values in raw form, and the first 8 of
  // them unpacked.
  uint32_t raw, tile;

  __device__ MlaLane(int warp, int lane) : entry(lane / 4 % 2), scales(lane / 16 * 16 + entry) {
    const int block = lane / 16 * 4 + lane / 8 % 2, chunk = lane % 4;
    raw = MlaRawOffset(warp * kMlaWarpEntries + entry, block * 4 + chunk);
    tile = MlaTileOffset(warp * kMlaWarpEntries + entry, block * 8 + chunk * 2);
  }
};

// Returns two neighbouring scales, those at lane / 16 * 2, of entry lane % kMlaWarpEntries of a
// warp. `base` is the address of those scales in entry 0 of the cache.
__device__ __forceinline__ float2 LoadScales(const char* base, int place) {
  // The load must not take the read-only path: a transfer beside this kernel may bring the
  // scales.
  return __ldcg(reinterpret_cast<const float2*>(base + int64_t{place} * kPackedEntryBytes));
}

__device__ __forceinline__ uint32_t ScalesOf(float2 scales) {
  return PackFp16(scales.x * kMlaUnit, scales.y * kMlaUnit);
}

// Copies a warp's entries into their rows of a tile. RoPE values, which are bf16 already, go to
// their final position. Latent values go to the first half of the row (MlaRawOffset). The copies
// bypass L1, which has few lines beside this much shared memory: a load into registers needs a
// line, and once there is none everything behind it in the pipe to shared memory waits too.
struct MlaCopies {
  const char* values[kMlaWarpEntries];
  const char* rope[kMlaWarpEntries / 4];

  // Computes everything that can be known before the tile is free. Lane i passes as `place` that
  // of entry i % kMlaWarpEntries.
  __device__ __forceinline__ MlaCopies(const char* base, int place, int lane) {
    // Opaque to the compiler, so that an address is one multiplication and addition.
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
  // Starts the copies. `target` is the address of the tile.
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

// Prefetches the warp's entries to L2, 128 bytes at a time and the end of the last one too.
__device__ __forceinline__ void FetchEntries(const char* base, int place, int lane) {
  const char* const entry = base + int64_t{place} * kPackedEntryBytes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = min((lane / kMlaWarpEntries * 2 + i) * 128, kPackedEntryBytes - 16);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(entry + at));
  }
}

// Returns once all but the newest kPending groups of the copies of all of the warp's lanes have
// landed. The whole warp calls it.
template <int kPending>
__device__ __forceinline__ void WaitForWarpCopies() {
  WaitForCopies<kPending>();
  __syncwarp();
}

// Two entries of a warp.
struct MlaPair {
  uint4 values[2];

  // Loads pair `pair`. `raw` is the lane's address for pair 0. Entry 2 * pair is row % 8 = 2 *
  // (pair % 4) of 8 rows, which moves the piece.
  __device__ __forceinline__ void Load(uint32_t raw, int pair) {
    const uint32_t at =
        (raw ^ static_cast<uint32_t>(pair % 4 * 32)) + static_cast<uint32_t>(pair * 256);
    values[0] = LoadShared(at);
    values[1] = LoadShared(at + kMlaColumnBlockBytes);
  }

  // Stores pair `pair`. `tile` is the lane's address for pair 0, and `scales` are the lane's.
  // Entry 2 * pair is row % 8 = 2 * (pair % 4) of 8 rows, which moves the chunk.
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
