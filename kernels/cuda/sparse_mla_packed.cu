// Latent attention over lists of packed entries, for decode rows and rows of prompts alike.
//
// A block computes 64 heads of a row; mla_plan.cuh says which pieces of which rows. Three
// warpgroups: one unpacks entries, 64 at a time, to bf16 in shared memory (two tiles of them); one,
// the scorer, computes scores and their softmax and the result's first 256 columns; the last one,
// the adder, the other 256 columns, with weights that the scorer left it in shared memory. The
// result lies in registers, 128 of each thread.
//
// Bytes: 656 of each (row, entry) once from HBM and once more from L2, heads / 64 - 1 times.
// Operations: 2 * 1088 * heads a (row, entry): floor at 990 TFLOP/s, of 2,048 entries and 128
// heads, 0.58 us a row, 74 us for 128 rows. On an SM a tile takes the tensor cores 2,176 cycles
// (1,152 for scores, 1,024 for values), shared memory 2,300 (221 KB read by products, 72 KB
// written, 128 bytes a cycle), and unpacking it some 1,100 instructions of each of four warps, half
// of them at half rate: 1,600 cycles.
#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mla_entries.cuh"
#include "kernels/cuda/mla_internal.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/wgmma.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kWarpgroup = 128;
constexpr int kThreads = 2 * kWarpgroup + 32 * kMlaUnpackWarps;
constexpr int kStages = 2;
// Of a thread; their sum is that of the 168 which each of 384 threads may have. The compiler keeps
// products asynchronous only where every role says its number.
constexpr int kScorerRegisters = 200;
constexpr int kAdderRegisters = 200;
constexpr int kUnpackerRegisters = 104;

// A piece as those who compute it see it.
struct Piece {
  int row;  // -1: there are no more pieces
  int slot;
  int entries;
  int index;      // of the slot for its sums
  bool folds;     // that slot has a total, of the pieces before it
  bool finishes;  // the row: its result is written
  bool ends_row;  // in this group
};

struct PackedShared {
  unsigned char query[kMlaTileBytes];
  unsigned char entries[kStages][kMlaTileBytes];
  // From the scorer to the adder, each of its threads to the same one: weights of a tile as
  // operands of its products, what to keep of the sums before them, and at a piece's end the
  // softmax.
  uint4 weights[kMlaTileEntries / 16][kWarpgroup];
  float2 keep[kWarpgroup];
  // Where the scorer and the adder are, and the piece that they work on.
  MlaPosition positions[2];
  Piece pieces[2];
  MlaTiles tiles[kMlaUnpackWarps];  // of the unpacking warps
  uint64_t query_here, query_done;
  uint64_t entries_here[kStages], entries_done[kStages];
  uint64_t weights_here, weights_done;
};

template <int kRegisters>
__device__ __forceinline__ void GiveRegistersBack() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Of the warpgroup alone.
__device__ __forceinline__ void SyncWarpgroup(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kWarpgroup) : "memory");
}

// One arrival for a warp, after what all its lanes did.
__device__ __forceinline__ void ArriveWarp(uint64_t& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) Arrive(SharedAddress(&barrier));
}

// Goes to the warpgroup's next piece, or to its first. One thread does: what it needs to know for
// that would be in the way of the sums, in every thread's registers.
__device__ __forceinline__ const Piece& NextPiece(const SparseMlaParams& p, const MlaShape& shape,
                                                  PackedShared& shared, bool first) {
  const int group = static_cast<int>(threadIdx.x) / kWarpgroup;
  Piece& piece = shared.pieces[group];
  SyncWarpgroup(1 + group);  // All are done with the last one.
  if (threadIdx.x % kWarpgroup == 0) {
    MlaWalk walk(p, shared.positions[group]);
    if (!first) walk.Next();
    shared.positions[group] = walk.position();
    if (walk.done()) {
      piece.row = -1;
    } else {
      const bool from_start = walk.first_piece() == 0;
      piece = {walk.row(),
               walk.slot(),
               walk.entries(),
               from_start ? shape.slots - 1 : walk.piece() - walk.first_piece(),
               from_start && walk.piece() > 0,
               from_start && walk.IsLast(),
               walk.EndsRow()};
    }
  }
  SyncWarpgroup(1 + group);
  return piece;
}

__device__ void CopyQuery(const SparseMlaParams& p, const CUtensorMap& map, int row, int head,
                          PackedShared& shared) {
  const uint32_t here = SharedAddress(&shared.query_here);
  ArriveExpecting(here, kMlaTileBytes);
#pragma unroll
  for (int i = 0; i < kMlaWidth / 64; ++i) {
    CopyTile(SharedAddress(shared.query) + static_cast<uint32_t>(i * kMlaColumnBlockBytes), &map,
             i * 64, row * p.heads + head, here, kEvictFirst);
  }
}

__device__ void UnpackTiles(const SparseMlaParams& p, const MlaShape& shape, const CUtensorMap& map,
                            PackedShared& shared) {
  constexpr uint32_t kRing = MlaTiles::kRing;
  const int head = static_cast<int>(blockIdx.x) % shape.head_tiles * kMlaHeads;
  const int thread = static_cast<int>(threadIdx.x) - 2 * kWarpgroup;
  const int warp = thread / 32, lane = thread % 32;
  const auto* base = static_cast<const char*>(p.cache.base);
  MlaTiles& tiles = shared.tiles[warp];
  const MlaTile* const ring = tiles.ring;
  if (lane == 0) {
#pragma unroll 1
    for (uint32_t n = 1; n < kRing; ++n) tiles.Step(p, n);
  }
  __syncwarp();
  if (ring[0].row < 0) return;
  // Under way: entries of tile n, pages of tiles n + 1 and n + 2, numbers of tile n + 3.
  int number = MlaNumber(p, ring[0], warp, lane), number1 = MlaNumber(p, ring[1], warp, lane);
  int number2 = MlaNumber(p, ring[2], warp, lane), number3 = MlaNumber(p, ring[3], warp, lane);
  int place = MlaPlace(p.cache, shape, number, MlaPage(p.cache, shape, ring[0], number));
  int page1 = MlaPage(p.cache, shape, ring[1], number1);
  int page2 = MlaPage(p.cache, shape, ring[2], number2);
  MlaBatch batches[2];
  batches[0].Load(base, place, 0, lane);
  batches[1].Load(base, place, kMlaBatch, lane);
  if (thread == 0) CopyQuery(p, map, ring[0].row, head, shared);
  uint32_t queries = 0;
#pragma unroll 1
  for (uint32_t n = 0; ring[n % kRing].row >= 0; ++n) {
    const uint32_t stage = n % kStages;
    if (n >= kStages) {
      WaitBarrier(SharedAddress(&shared.entries_done[stage]), (n / kStages - 1) & 1);
    }
    const uint32_t target = SharedAddress(shared.entries[stage]);
    const int row = warp * kMlaWarpEntries;
    // RoPE values are bf16 as they are: 8 pieces of 16 bytes an entry, 4 entries at a time.
#pragma unroll
    for (int i = 0; i < kMlaWarpEntries; i += 4) {
      const int e = i + lane / 8, of = __shfl_sync(0xffffffffu, place, e);
      CopyAsync16(target + MlaTileOffset(row + e, kPackedRank / 8 + lane % 8),
                  base + int64_t{of} * kPackedEntryBytes + kPackedRank + 16 + lane % 8 * 16, true);
    }
    CommitCopies();
    const int next_place = MlaPlace(p.cache, shape, number1, page1);
    const bool more = ring[(n + 1) % kRing].row >= 0;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      // What is loaded meanwhile: the other half of this tile, then the first half of the next.
      const int coming = half == 0 ? place : next_place, at = half == 0 ? 8 : 0;
      batches[0].Store(target, row + half * 8, lane);
      if (half == 0 || more) batches[0].Load(base, coming, at, lane);
      batches[1].Store(target, row + half * 8 + kMlaBatch, lane);
      if (half == 0 || more) batches[1].Load(base, coming, at + kMlaBatch, lane);
    }
    place = next_place;
    WaitForCopies<0>();
    PublishToAsyncProxy();
    ArriveWarp(shared.entries_here[stage]);
    if (thread == 0 && n > 0 && ring[n % kRing].is_first) {
      WaitBarrier(SharedAddress(&shared.query_done), queries++ & 1);
      CopyQuery(p, map, ring[n % kRing].row, head, shared);
    }
    number1 = number2;
    page1 = page2;
    number2 = number3;
    page2 = MlaPage(p.cache, shape, ring[(n + 3) % kRing], number3);
    __syncwarp();  // All have read tile n's.
    if (lane == 0) tiles.Step(p, n + kRing);
    __syncwarp();
    number3 = MlaNumber(p, ring[n % kRing], warp, lane);
  }
}

// Adds the weighted values of a tile to a warpgroup's 256 columns.
__device__ __forceinline__ void AddValues(float (&o)[128], const uint4 (&weights)[4],
                                          uint32_t values) {
  BeginProducts();
#pragma unroll
  for (int step = 0; step < kMlaTileEntries / 16; ++step) {
    const uint32_t a[4] = {weights[step].x, weights[step].y, weights[step].z, weights[step].w};
    MultiplyRows(
        o, a,
        TileDescriptor(values + static_cast<uint32_t>(step * 16 * 128), kMlaColumnBlockBytes));
  }
  CommitProducts();
}

__device__ __forceinline__ void Keep(float (&o)[128], float2 keep) {
  if (!__any_sync(0xffffffffu, keep.x != 1.0f || keep.y != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] *= i / 2 % 2 == 0 ? keep.x : keep.y;
}

// The end of a piece: to the result, or to a slot of the scratch.
__device__ __forceinline__ void FinishPiece(const SparseMlaParams& p, const MlaShape& shape,
                                            const Piece& piece, float (&o)[128],
                                            Softmax (&state)[2]) {
  const MlaThread me = {static_cast<int>(threadIdx.x)};
  const int group = static_cast<int>(blockIdx.x) / shape.head_tiles;
  const int head_tile = static_cast<int>(blockIdx.x) % shape.head_tiles;
  float4* const slot = MlaSlot(p, shape, group, head_tile, piece.index) + me.thread;
  if (piece.folds) {
    const float4 of = slot[32 * kMlaAdders];
    Softmax total[2] = {{of.x, of.y}, {of.z, of.w}};
    const FoldWeights folds[2] = {Fold(total[0], state[0]), Fold(total[1], state[1])};
    state[0] = total[0];
    state[1] = total[1];
#pragma unroll
    for (int first = 0; first < 32; first += 4) {
      float4 sums[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = slot[(first + i) * kMlaAdders];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* const at = o + 4 * (first + i);
        at[0] = Fold(folds[0], sums[i].x, at[0]);
        at[1] = Fold(folds[0], sums[i].y, at[1]);
        at[2] = Fold(folds[1], sums[i].z, at[2]);
        at[3] = Fold(folds[1], sums[i].w, at[3]);
      }
    }
  }
  if (!piece.finishes) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      slot[i * kMlaAdders] = {o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]};
    }
    slot[32 * kMlaAdders] = {state[0].m, state[0].l, state[1].m, state[1].l};
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = head_tile * kMlaHeads + me.Head(h);
    const int64_t item = int64_t{piece.row} * p.heads + head;
    MlaResult result = {0.0f, 0.0f, NegativeInfinity()};
    if (piece.slot >= 0) result = ResultOf(p, item, state[h]);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      WritePair(p, result, item * kPackedRank + me.Column(i), o[4 * i + 2 * h],
                o[4 * i + 2 * h + 1]);
    }
    if (me.thread < kWarpgroup && me.thread % 4 == 0 && p.lse != nullptr) p.lse[item] = result.lse;
  }
}

// Scores of a tile become weights, in place, and the softmax takes them in. Returns what to keep of
// the sums before them. `valid`: entries that count.
__device__ __forceinline__ float2 Weigh(float (&score)[32], Softmax (&state)[2], float scale,
                                        int valid) {
  if (valid < kMlaTileEntries) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (column + i / 4 * 8 + i % 2 >= valid) score[i] = NegativeInfinity();
    }
  }
  float keep[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float m = NegativeInfinity();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i / 2 % 2 == h) m = fmaxf(m, score[i]);
    }
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    m = fmaxf(state[h].m, m * scale);
    keep[h] = Exp2(state[h].m - m);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i / 2 % 2 != h) continue;
      score[i] = Exp2(fmaf(score[i], scale, -m));
      sum += score[i];
    }
    state[h] = {m, fmaf(state[h].l, keep[h], sum)};
  }
  return {keep[0], keep[1]};
}

// Starts the products of the n-th tile's entries and the query, once the tile is there.
__device__ __forceinline__ void StartScores(float (&score)[32], PackedShared& shared, uint32_t n) {
  const uint32_t query = SharedAddress(shared.query);
  const uint32_t keys = SharedAddress(shared.entries[n % kStages]);
  WaitBarrier(SharedAddress(&shared.entries_here[n % kStages]), n / kStages & 1);
  BeginProducts();
#pragma unroll
  for (int step = 0; step < kMlaWidth / 16; ++step) {
    const auto at = static_cast<uint32_t>(step / 4 * kMlaColumnBlockBytes + step % 4 * 32);
    MultiplyTiles(score, TileDescriptor(query + at), TileDescriptor(keys + at), step > 0);
  }
  CommitProducts();
}

__device__ void ScoreTiles(const SparseMlaParams& p, const MlaShape& shape, PackedShared& shared) {
  const float scale = p.scale * kLog2E;
  // Tiles, what was handed to the adder, and queries so far.
  uint32_t n = 0, handed = 0, queries = 0;
  bool has_query = false;  // of this row
  float o[128];
  for (bool first = true;; first = false) {
    const Piece& piece = NextPiece(p, shape, shared, first);
    if (piece.row < 0) return;
    Softmax state[2] = {{NegativeInfinity(), 0.0f}, {NegativeInfinity(), 0.0f}};
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0;
    if (piece.entries > 0 && !has_query) {
      WaitBarrier(SharedAddress(&shared.query_here), queries++ & 1);
      has_query = true;
    }
    for (int entries = piece.entries; entries > 0; entries -= kMlaTileEntries, ++n) {
      const uint32_t stage = n % kStages;
      float score[32];
      StartScores(score, shared, n);
      WaitForProducts<0>();
      if (entries <= kMlaTileEntries && piece.ends_row) {
        ArriveWarp(shared.query_done);
        has_query = false;
      }
      const float2 keep = Weigh(score, state, scale, entries);
      uint4 weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const from = score + 8 * i;
        weights[i] = {PackBf16(from[0], from[1]), PackBf16(from[2], from[3]),
                      PackBf16(from[4], from[5]), PackBf16(from[6], from[7])};
      }
      if (handed > 0) WaitBarrier(SharedAddress(&shared.weights_done), (handed - 1) & 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) shared.weights[i][threadIdx.x] = weights[i];
      shared.keep[threadIdx.x] = keep;
      ArriveWarp(shared.weights_here);
      ++handed;
      Keep(o, keep);
      AddValues(o, weights, SharedAddress(shared.entries[stage]));
      WaitForProducts<0>();
      ArriveWarp(shared.entries_done[stage]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      state[h].l += __shfl_xor_sync(0xffffffffu, state[h].l, 1);
      state[h].l += __shfl_xor_sync(0xffffffffu, state[h].l, 2);
    }
    if (piece.entries > 0) {
      WaitBarrier(SharedAddress(&shared.weights_done), (handed - 1) & 1);
      shared.weights[0][threadIdx.x] = {__float_as_uint(state[0].m), __float_as_uint(state[0].l),
                                        __float_as_uint(state[1].m), __float_as_uint(state[1].l)};
      ArriveWarp(shared.weights_here);
      ++handed;
    }
    FinishPiece(p, shape, piece, o, state);
  }
}

__device__ void AddTiles(const SparseMlaParams& p, const MlaShape& shape, PackedShared& shared) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  uint32_t n = 0, taken = 0;
  float o[128];
  for (bool first = true;; first = false) {
    const Piece& piece = NextPiece(p, shape, shared, first);
    if (piece.row < 0) return;
    Softmax state[2] = {{NegativeInfinity(), 0.0f}, {NegativeInfinity(), 0.0f}};
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0;
    for (int entries = piece.entries; entries > 0; entries -= kMlaTileEntries, ++n) {
      const uint32_t stage = n % kStages;
      WaitBarrier(SharedAddress(&shared.weights_here), taken++ & 1);
      uint4 weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[i] = shared.weights[i][thread];
      const float2 keep = shared.keep[thread];
      ArriveWarp(shared.weights_done);
      Keep(o, keep);
      WaitBarrier(SharedAddress(&shared.entries_here[stage]), n / kStages & 1);
      AddValues(o, weights, SharedAddress(shared.entries[stage]) + 4 * kMlaColumnBlockBytes);
      WaitForProducts<0>();
      ArriveWarp(shared.entries_done[stage]);
    }
    if (piece.entries > 0) {
      WaitBarrier(SharedAddress(&shared.weights_here), taken++ & 1);
      const uint4 of = shared.weights[0][thread];
      ArriveWarp(shared.weights_done);
      state[0] = {__uint_as_float(of.x), __uint_as_float(of.y)};
      state[1] = {__uint_as_float(of.z), __uint_as_float(of.w)};
    }
    FinishPiece(p, shape, piece, o, state);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    PackedMlaKernel(const __grid_constant__ SparseMlaParams p,
                    const __grid_constant__ CUtensorMap map, MlaShape shape) {
  extern __shared__ __align__(1024) unsigned char memory[];
  PackedShared& shared = *reinterpret_cast<PackedShared*>(memory);
  if (threadIdx.x == 0) {
    PrefetchMap(&map);
    InitBarrier(SharedAddress(&shared.query_here), 1);
    InitBarrier(SharedAddress(&shared.query_done), 4);  // warps
    for (int i = 0; i < kStages; ++i) {
      InitBarrier(SharedAddress(&shared.entries_here[i]), kMlaUnpackWarps);
      InitBarrier(SharedAddress(&shared.entries_done[i]), 8);
    }
    InitBarrier(SharedAddress(&shared.weights_here), 4);
    InitBarrier(SharedAddress(&shared.weights_done), 4);
  }
  PublishBarriers();
  __syncthreads();
  LetNextKernelStart();
  WaitForPriorKernels();
  MlaWalk walk(p);
  walk.Start(static_cast<int>(blockIdx.x) / shape.head_tiles,
             static_cast<int>(gridDim.x) / shape.head_tiles);
  const int role = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (role < 2 && threadIdx.x % kWarpgroup == 0) shared.positions[role] = walk.position();
  if (role >= 2 && threadIdx.x % 32 == 0) {
    shared.tiles[threadIdx.x / 32 - 2 * kWarpgroup / 32].Start(p, walk.position());
  }
  if (role >= 2) {
    GiveRegistersBack<kUnpackerRegisters>();
    UnpackTiles(p, shape, map, shared);
  } else if (role == 1) {
    TakeRegisters<kAdderRegisters>();
    AddTiles(p, shape, shared);
  } else {
    TakeRegisters<kScorerRegisters>();
    ScoreTiles(p, shape, shared);
  }
}

// Folds rows that groups share, in the order of their pieces. Block (g - 1, head tile, part): the
// row that group g begins inside of, if its first piece is of group g - 1; `part` of kParts of the
// vectors of each slot.
constexpr int kParts = 8;
__global__ void __launch_bounds__(kMlaAdders)
    CombineMlaKernel(const __grid_constant__ SparseMlaParams p, MlaShape shape, int groups) {
  constexpr int kVectors = 32 / kParts;
  const int group = static_cast<int>(blockIdx.x) + 1, head_tile = static_cast<int>(blockIdx.y);
  const MlaThread me = {static_cast<int>(threadIdx.x)};
  const int begin = static_cast<int>(blockIdx.z) * kVectors;
  LetNextKernelStart();
  WaitForPriorKernels();
  MlaWalk walk(p);
  walk.Start(group, groups);
  if (walk.done() || walk.piece() == 0 || walk.GroupOf(0) != group - 1) return;
  const int pieces = walk.pieces();
  Softmax state[2];
  float4 sums[kVectors];
  for (int piece = walk.piece() - 1; piece < pieces; ++piece) {
    const int of = walk.GroupOf(piece);
    const int index = of == group - 1 ? shape.slots - 1 : piece - walk.FirstPieceIn(of);
    const float4* const slot = MlaSlot(p, shape, of, head_tile, index) + me.thread;
    const float4 from_state = slot[32 * kMlaAdders];
    float4 from[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) from[i] = slot[(begin + i) * kMlaAdders];
    const Softmax other[2] = {{from_state.x, from_state.y}, {from_state.z, from_state.w}};
    if (of == group - 1) {
      state[0] = other[0];
      state[1] = other[1];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) sums[i] = from[i];
      continue;
    }
    const FoldWeights folds[2] = {Fold(state[0], other[0]), Fold(state[1], other[1])};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      sums[i] = {Fold(folds[0], sums[i].x, from[i].x), Fold(folds[0], sums[i].y, from[i].y),
                 Fold(folds[1], sums[i].z, from[i].z), Fold(folds[1], sums[i].w, from[i].w)};
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = head_tile * kMlaHeads + me.Head(h);
    const int64_t item = int64_t{walk.row()} * p.heads + head;
    const MlaResult result = ResultOf(p, item, state[h]);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      WritePair(p, result, item * kPackedRank + me.Column(begin + i),
                h == 0 ? sums[i].x : sums[i].z, h == 0 ? sums[i].y : sums[i].w);
    }
    if (begin == 0 && me.thread < kWarpgroup && me.thread % 4 == 0 && p.lse != nullptr) {
      p.lse[item] = result.lse;
    }
  }
}

// Of the current device; 0 where there is none.
int Processors() {
  int device = 0, processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 0;
  }
  return processors;
}

// How many groups `rows` rows can use.
int64_t Groups(int64_t rows, int32_t heads, int64_t capacity) {
  return std::min<int64_t>(std::max(1, Processors() / (heads / kMlaHeads)),
                           rows * std::max(1, MlaSlots(capacity)));
}

}  // namespace

bool HasPackedKernel(const SparseMlaParams& p) {
  const PagedLatents& c = p.cache;
  return c.type == DType::kFloat8E4M3 && c.block_tokens > 1 && p.q_type == DType::kBFloat16 &&
         p.heads % kMlaHeads == 0 && p.heads <= kMaxPackedHeads &&
         c.page_bytes == int64_t{c.block_tokens} * kPackedEntryBytes &&
         AreAligned(16, p.q, c.base, p.scratch) && AreAligned(8, p.out, p.other_o);
}

cudaError_t LaunchPackedSparseMla(const SparseMlaParams& p, cudaStream_t stream) {
  const auto block_tokens = static_cast<uint32_t>(p.cache.block_tokens);
  MlaShape shape = {p.heads / kMlaHeads, MlaSlots(p.capacity),
                    static_cast<uint32_t>(((uint64_t{1} << 32) + block_tokens - 1) / block_tokens)};
  int64_t groups = Groups(p.rows, p.heads, p.capacity);
  if (shape.slots > 0) {
    const int64_t slots = p.scratch_bytes / (shape.head_tiles * kMlaSlotBytes);
    if (slots == 0) return cudaErrorInvalidValue;
    groups = std::max<int64_t>(1, std::min(groups, slots / shape.slots));
    if (groups == 1) shape.slots = 1;  // No row is cut.
  }
  cudaError_t error =
      cudaFuncSetAttribute(PackedMlaKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(sizeof(PackedShared)));
  if (error != cudaSuccess) return error;
  // The same split of an SM's memory for both: changing it between kernels drains the SM.
  error = cudaFuncSetAttribute(CombineMlaKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  CUtensorMap map;
  error = MakeTileMap(p.q, p.rows * p.heads, kMlaWidth, kMlaHeads, &map);
  if (error != cudaSuccess) return error;
  error = LaunchKernel(PackedMlaKernel, dim3(static_cast<unsigned>(groups * shape.head_tiles)),
                       dim3(kThreads), sizeof(PackedShared), stream, p, map, shape);
  if (error != cudaSuccess || shape.slots == 0 || groups == 1) return error;
  const dim3 blocks(static_cast<unsigned>(groups - 1), static_cast<unsigned>(shape.head_tiles),
                    kParts);
  return LaunchKernel(CombineMlaKernel, blocks, dim3(kMlaAdders), 0, stream, p, shape,
                      static_cast<int>(groups));
}

int64_t SparseMlaScratchBytes(int32_t max_decode_rows, int32_t heads, int32_t rank,
                              int64_t capacity) {
  if (rank != kPackedRank || heads % kMlaHeads != 0 || heads > kMaxPackedHeads) return 0;
  return Groups(max_decode_rows, heads, capacity) * (heads / kMlaHeads) * MlaSlots(capacity) *
         kMlaSlotBytes;
}

}  // namespace sluice::kernels::cuda
