// A block of latent attention over lists of packed entries (sparse_mla_packed.cu): its shared
// memory, and the warpgroups that fill it with queries and entries.
#pragma once

#include "kernels/cuda/common/warpgroup.cuh"
#include "kernels/cuda/mla/mla_entries.cuh"
#include "kernels/cuda/mla/mla_sums.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kMlaWarpgroup = 128;
inline constexpr int kMlaStages = 2;
// Named barriers of some warps, beside the barrier of all threads.
inline constexpr int kScorerBarrier = 1, kUnpackBarrier = 2;

struct MlaShared {
  unsigned char query[kMlaTileBytes];
  unsigned char entries[kMlaStages][kMlaTileBytes];
  // The scorer passes to the adder: the weights of a tile as operands of its products, each to
  // the thread with the same number; for each head the factor by which earlier sums are kept;
  // and, with a piece's last tile, the piece's softmax.
  uint4 weights[kMlaTileEntries / 16][kMlaWarpgroup];
  float keep[kMlaHeads];
  Softmax softmax[kMlaHeads];
  MlaTiles tiles;
  // The piece that scorer and adder work on, and the next one.
  MlaPosition position;
  MlaPiece pieces[2];
  MlaPlaces places[kMlaUnpackWarps];
  uint64_t query_here, query_done;
  uint64_t entries_here[kMlaStages], entries_done[kMlaStages];
  uint64_t weights_here, weights_done;
  uint64_t pieces_here[2], pieces_done[2];
};
static_assert(sizeof(MlaShared) <= 227 * 1024);

// Arrives once for a warp, after the work of all its lanes.
__device__ __forceinline__ void ArriveWarp(uint64_t& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) Arrive(SharedAddress(&barrier));
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
  const int warp = thread / 32;
  int lane = thread % 32;
  const auto* base = static_cast<const char*>(p.cache.base);
  const MlaTile* const ring = shared.tiles.ring;
  MlaPlaces& places = shared.places[warp];
  // Makes the records of tiles 0 to 2, so that the first tiles' numbers can be asked for. The
  // other records and the query come while those are waited for.
  const auto step = [&](uint32_t first, uint32_t end) {
#pragma unroll 1
    for (uint32_t n = first; n < end; ++n) shared.tiles.Step(p, n);
  };
  if (thread == 0) step(1, 3);
  SyncThreads(kUnpackBarrier, 32 * kMlaUnpackWarps);
  if (ring[0].row < 0) return;
  // Loads under way when tile n begins: pages of tile n + 1, numbers of tile n + 2.
  places.AskNumber(p, ring[0], 0, warp, lane);
  places.AskNumber(p, ring[1], 1, warp, lane);
  CommitCopies();
  if (thread == 0) {
    CopyQuery(p, map, ring[0].row, head, shared);
    step(3, MlaTiles::kAhead);
  }
  WaitForWarpCopies<0>();
  places.AskPage(p.cache, shape, ring[0], 0, lane);
  places.AskPage(p.cache, shape, ring[1], 1, lane);
  CommitCopies();
  WaitForWarpCopies<0>();
  int place = places.Place(p.cache, shape, 0, lane % kMlaWarpEntries);
  __syncwarp();  // all lanes have read those of tile 0
  places.AskNumber(p, ring[2], 2, warp, lane);
  CommitCopies();
  SyncThreads(kUnpackBarrier, 32 * kMlaUnpackWarps);
  uint32_t queries = 0;
  bool arrives = p.then_arrives;
#pragma unroll 1
  for (uint32_t n = 0; ring[n % kRing].row >= 0; ++n) {
    const uint32_t stage = n % kMlaStages, target = SharedAddress(shared.entries[stage]);
    // Offsets that follow from the lane are recomputed: there are no registers to keep them.
    asm volatile("" : "+r"(lane));
    __builtin_assume(lane >= 0 && lane < 32);
    const MlaLane of(warp, lane);
    if (arrives && ring[n % kRing].arrives) {
      WaitForPriorKernels();
      arrives = false;
    }
    const float2 two = LoadScales(base + kPackedRank + lane / 16 * 8, place);
    WaitForWarpCopies<0>();
    // Addresses of the next entries. After the last tile they are the same entries once more.
    int next = place;
    if (ring[(n + 1) % kRing].row >= 0) {
      next = places.Place(p.cache, shape, n + 1, lane % kMlaWarpEntries);
      FetchEntries(base, next, lane);
    }
    const MlaCopies copies(base, place, lane);
    if (n >= kMlaStages) {
      WaitBarrier(SharedAddress(&shared.entries_done[stage]), (n / kMlaStages - 1) & 1);
    }
    copies.Start(target, warp, lane);
    CommitCopies();
    // All lanes have read the place of tile n + 1, so these loads may overwrite it. Nothing waits
    // for them before the next tile.
    places.AskPage(p.cache, shape, ring[(n + 2) % kRing], n + 2, lane);
    places.AskNumber(p, ring[(n + 3) % kRing], n + 3, warp, lane);
    CommitCopies();
    WaitForWarpCopies<1>();
    const uint32_t scales = ScalesOf(two);
#pragma unroll
    for (int first = 0; first < kMlaPairs; first += kMlaBatch) {
      MlaPair pairs[kMlaBatch];
#pragma unroll
      for (int i = 0; i < kMlaBatch; ++i) pairs[i].Load(target + of.raw, first + i);
      __syncwarp();  // the rows are free
#pragma unroll
      for (int i = 0; i < kMlaBatch; ++i) {
        pairs[i].Store(target + of.tile, first + i,
                       __shfl_sync(0xffffffffu, scales, 2 * (first + i) + of.scales));
      }
    }
    PublishToAsyncProxy();
    ArriveWarp(shared.entries_here[stage]);
    place = next;
    if (thread == 0) {
      if (n > 0 && ring[n % kRing].is_first) {
        WaitBarrier(SharedAddress(&shared.query_done), queries++ & 1);
        CopyQuery(p, map, ring[n % kRing].row, head, shared);
      }
      shared.tiles.Step(p, n + MlaTiles::kAhead);
    }
    __syncwarp();
  }
}

}  // namespace sluice::kernels::cuda
