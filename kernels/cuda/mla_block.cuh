// A block of latent attention over lists of packed entries (sparse_mla_packed.cu): its shared
// memory, and the warpgroup that fills it with queries and entries.
#pragma once

#include "kernels/cuda/mla_entries.cuh"
#include "kernels/cuda/mla_sums.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kMlaWarpgroup = 128;
inline constexpr int kMlaStages = 2;

#ifdef MLA_TRACE
__device__ unsigned mla_trace[3][16][6];
#define MLA_MARK(role, n, what)                                 \
  if (threadIdx.x % 128 == 0 && blockIdx.x == 40 && (n) < 16) { \
    unsigned t;                                                 \
    asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");   \
    mla_trace[role][n][what] = t;                               \
  }
#else
#define MLA_MARK(role, n, what)
#endif

struct MlaShared {
  unsigned char query[kMlaTileBytes];
  unsigned char entries[kMlaStages][kMlaTileBytes];
  // Of a tile, from the warpgroup that scored it: its weights, [64 heads][64 entries] of fp16,
  // swizzled; of each head, the softmax after it (m, l) and what to keep of the sums before it.
  unsigned char weights[kMlaHeads * 128];
  float4 states[kMlaHeads];
  // Where the two warpgroups are, and the piece that they work on.
  MlaPosition positions[2];
  MlaPiece pieces[2];
  MlaTiles tiles[kMlaUnpackWarps];  // of the unpacking warps
  MlaPlaces places[kMlaUnpackWarps];
  uint64_t query_here, query_done;
  uint64_t entries_here[kMlaStages], entries_done[kMlaStages];
  uint64_t weights_here[2], weights_done;
};
static_assert(sizeof(MlaShared) <= 227 * 1024);

// One arrival for a warp, after what all its lanes did.
__device__ __forceinline__ void ArriveWarp(uint64_t& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) Arrive(SharedAddress(&barrier));
}

// Four blocks of [8][8] of two bytes: lane i holds the rows' pairs, and has the address of row i %
// 8 of block i / 8.
__device__ __forceinline__ void StoreMatrices(uint32_t to, uint4 v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// The same for every lane, once its copies (CopyAsync16) have landed.
__device__ __forceinline__ void ArriveAfterCopies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void CopyQuery(const SparseMlaParams& p, const CUtensorMap& map, int row,
                                          int head, MlaShared& shared) {
  const uint32_t here = SharedAddress(&shared.query_here);
  ArriveExpecting(here, kMlaTileBytes);
#pragma unroll
  for (int i = 0; i < kMlaWidth / 64; ++i) {
    CopyTile(SharedAddress(shared.query) + static_cast<uint32_t>(i * kMlaColumnBlockBytes), &map,
             i * 64, row * p.heads + head, here, kEvictFirst);
  }
}

__device__ __forceinline__ void UnpackTiles(const SparseMlaParams& p, const MlaShape& shape,
                                            const CUtensorMap& map, MlaShared& shared) {
  constexpr uint32_t kRing = MlaTiles::kRing;
  const int head = static_cast<int>(blockIdx.x) % shape.head_tiles * kMlaHeads;
  const int thread = static_cast<int>(threadIdx.x) - 2 * kMlaWarpgroup;
  const int warp = thread / 32, lane = thread % 32;
  const auto* base = static_cast<const char*>(p.cache.base);
  const MlaLane of(warp, lane);
  const char* const values = base + of.values;
  const char* const scale_base = base + kPackedRank + lane / 16 * 8;
  const char* const rope_base = base + kPackedRank + 16 + lane % 8 * 16;
  MlaTiles& tiles = shared.tiles[warp];
  const MlaTile* const ring = tiles.ring;
  MlaPlaces& places = shared.places[warp];
  if (lane == 0) {
#pragma unroll 1
    for (uint32_t n = 1; n < kRing; ++n) tiles.Step(p, n);
  }
  __syncwarp();
  if (ring[0].row < 0) return;
  if (thread == 0) CopyQuery(p, map, ring[0].row, head, shared);
  // Under way: entries of tile n, pages of tile n + 1, numbers of tile n + 2.
  const bool asks = lane < kMlaWarpEntries;
  const auto arrive = [] {
    CommitCopies();
    WaitForCopies<0>();
    __syncwarp();
  };
  if (asks) places.AskNumber(p, ring[0], 0, warp, lane);
  if (asks) places.AskNumber(p, ring[1], 1, warp, lane);
  arrive();
  if (asks) places.AskPage(p.cache, shape, ring[0], 0, lane);
  if (asks) places.AskPage(p.cache, shape, ring[1], 1, lane);
  arrive();
  int place = places.Place(p.cache, shape, 0, lane % kMlaWarpEntries);
  __syncwarp();
  if (asks) places.AskNumber(p, ring[2], 2, warp, lane);
  CommitCopies();
  MlaPair pairs[kMlaFlight];
#pragma unroll
  for (int i = 0; i < kMlaFlight; ++i) pairs[i].Load(values, place, 2 * i + of.entry);
  uint32_t scales = ScalesOf(LoadScales(scale_base, place));
  uint32_t queries = 0;
#pragma unroll 1
  for (uint32_t n = 0; ring[n % kRing].row >= 0; ++n) {
    const uint32_t stage = n % kMlaStages;
    MLA_MARK(2, n, 0);
    WaitForCopies<0>();  // Those of the tile before.
    __syncwarp();
    // Behind the last tile the same entries once more.
    const bool more = ring[(n + 1) % kRing].row >= 0;
    const int next_place =
        more ? places.Place(p.cache, shape, n + 1, lane % kMlaWarpEntries) : place;
    const float2 next_scales = LoadScales(scale_base, next_place);
    __syncwarp();  // All have read tile n + 1's.
    if (asks) {
      places.AskPage(p.cache, shape, ring[(n + 2) % kRing], n + 2, lane);
      places.AskNumber(p, ring[(n + 3) % kRing], n + 3, warp, lane);
    }
    if (n >= kMlaStages) {
      WaitBarrier(SharedAddress(&shared.entries_done[stage]), (n / kMlaStages - 1) & 1);
    }
    MLA_MARK(2, n, 1);
    const uint32_t target = SharedAddress(shared.entries[stage]);
    // RoPE values are bf16 as they are: 8 pieces of 16 bytes an entry, 4 entries at a time.
#pragma unroll
    for (int i = 0; i < kMlaWarpEntries; i += 4) {
      const int e = i + lane / 8, at = __shfl_sync(0xffffffffu, place, e);
      CopyAsync16(target + MlaTileOffset(warp * kMlaWarpEntries + e, kPackedRank / 8 + lane % 8),
                  rope_base + int64_t{at} * kPackedEntryBytes, true);
    }
    ArriveAfterCopies(SharedAddress(&shared.entries_here[stage]));
    CommitCopies();
    MLA_MARK(2, n, 2);
    // A pair's registers take one of the pairs that are kMlaFlight further on.
#pragma unroll 1
    for (int first = 0; first < kMlaPairs; first += kMlaFlight) {
      const bool last = first + kMlaFlight == kMlaPairs;
      const int coming = last ? next_place : place;
      const int next = last ? 0 : 2 * (first + kMlaFlight);
#pragma unroll
      for (int i = 0; i < kMlaFlight; ++i) {
        pairs[i].Store(target + of.tile + static_cast<uint32_t>(first * 256), i,
                       __shfl_sync(0xffffffffu, scales, 2 * (first + i) + of.scales));
        pairs[i].Load(values, coming, next + 2 * i + of.entry);
        __syncwarp();
        if (i == kMlaFlight / 2 - 1) {
          MLA_MARK(2, n, 3);
        }
      }
    }
    MLA_MARK(2, n, 4);
    place = next_place;
    // Whoever waits for the tile orders its writes before what the tensor cores read: that fence
    // would wait for the loads here.
    ArriveWarp(shared.entries_here[stage]);
    scales = ScalesOf(next_scales);
    if (thread == 0 && n > 0 && ring[n % kRing].is_first) {
      WaitBarrier(SharedAddress(&shared.query_done), queries++ & 1);
      CopyQuery(p, map, ring[n % kRing].row, head, shared);
    }
    __syncwarp();  // All have read tile n's.
    if (lane == 0) tiles.Step(p, n + kRing);
    __syncwarp();
    MLA_MARK(2, n, 5);
  }
}

}  // namespace sluice::kernels::cuda
#ifdef MLA_TRACE
#include <cstdio>
void MlaTraceReset() {
  unsigned all[3][16][6] = {};
  cudaMemcpyToSymbol(sluice::kernels::cuda::mla_trace, all, sizeof(all));
}
void MlaTraceDump() {
  unsigned all[3][16][6];
  cudaMemcpyFromSymbol(all, sluice::kernels::cuda::mla_trace, sizeof(all));
  const char* roles[] = {"score", "add", "unpack"};
  for (int n = 0; n < 16; ++n)
    for (int r = 0; r < 3; ++r) {
      std::printf("tile %2d %-6s", n, roles[r]);
      for (int i = 0; i < 6; ++i)
        std::printf(" %6d", all[r][n][i] == 0 ? -1 : int(all[r][n][i] - all[2][0][0]));
      std::printf("\n");
    }
}
#endif
