// Latent attention over lists of packed entries, for decode rows and rows of prompts alike.
//
// A block computes 64 heads of a row; mla_plan.cuh says which pieces of which rows. Three
// warpgroups: one unpacks entries, 64 at a time, to fp16 in shared memory (two tiles of them); one,
// the scorer, computes scores and their softmax and the result's first 256 columns; the last one,
// the adder, the other 256 columns, with weights that the scorer left it in shared memory. The
// result lies in registers, 128 of each thread.
//
// Bytes: 656 of each (row, entry) once from HBM and once more from L2, heads / 64 - 1 times.
// Operations: 2 * 1088 * heads a (row, entry): floor at 990 TFLOP/s, of 2,048 entries and 128
// heads, 0.58 us a row, 74 us for 128 rows. On an SM a tile takes the tensor cores 2,176 cycles
// (1,152 for scores, 1,024 for values) and shared memory 2,300 (221 KB read by products, 72 KB
// written, 128 bytes a cycle).
//
// Measured on an H200 (sluice-mla-bench), 128 heads, 2,048 entries, 1 / 8 / 32 / 64 / 128 rows: 37
// / 41 / 82 / 165 / 318 us. A tile takes some 5,300 cycles: 1,500 are scores, 1,000 their softmax,
// 700 values; for the rest the products wait for entries, or for one another.
#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mla_block.cuh"
#include "kernels/cuda/mla_internal.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/warpgroup.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 2 * kMlaWarpgroup + 32 * kMlaUnpackWarps;
// Of a thread; their sum is that of the 168 which each of 384 threads may have. The compiler keeps
// products asynchronous only where every role says its number.
constexpr int kScorerRegisters = 200;
constexpr int kAdderRegisters = 200;
constexpr int kUnpackerRegisters = 104;

// Of the warpgroup alone.
__device__ __forceinline__ void SyncWarpgroup(int barrier) { SyncThreads(barrier, kMlaWarpgroup); }

// Goes to the warpgroup's next piece, or to its first. One thread does: what it needs to know for
// that would be in the way of the sums, in every thread's registers.
__device__ __forceinline__ const MlaPiece& NextPiece(const SparseMlaParams& p,
                                                     const MlaShape& shape, MlaShared& shared,
                                                     bool first) {
  const int group = static_cast<int>(threadIdx.x) / kMlaWarpgroup;
  MlaPiece& piece = shared.pieces[group];
  SyncWarpgroup(1 + group);  // All are done with the last one.
  if (threadIdx.x % kMlaWarpgroup == 0) {
    MlaWalk walk(p, shared.positions[group]);
    if (!first) walk.Next();
    shared.positions[group] = walk.position();
    if (walk.done()) {
      piece.row = -1;
    } else {
      const bool from_start = walk.first_piece() == 0, of_first = walk.IsOfFirst();
      const int before = of_first ? 0 : walk.first_pieces();  // pieces of the other list
      piece = {walk.row(),
               walk.slot(),
               walk.entries(),
               from_start ? shape.slots - (of_first ? 2 : 1) : walk.piece() - walk.first_piece(),
               from_start && walk.piece() > before,
               from_start && of_first && walk.piece() + 1 == walk.first_pieces(),
               from_start && walk.IsLast(),
               from_start && before > 0,
               walk.EndsRow()};
    }
  }
  SyncWarpgroup(1 + group);
  return piece;
}

// Adds the weighted values of a tile to a warpgroup's 256 columns.
__device__ __forceinline__ void AddValues(float (&o)[128], const uint4 (&weights)[4],
                                          uint32_t values) {
  BeginProducts();
#pragma unroll
  for (int step = 0; step < kMlaTileEntries / 16; ++step) {
    const uint32_t a[4] = {weights[step].x, weights[step].y, weights[step].z, weights[step].w};
    MultiplyRows<Operand::kFp16>(
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

// Sums of latents times kMlaUnit, back to what they are.
__device__ __forceinline__ void Unscale(float (&o)[128]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] *= 1.0f / kMlaUnit;
}

// Waits for the n-th tile's entries.
__device__ __forceinline__ void WaitForEntries(MlaShared& shared, uint32_t n) {
  WaitBarrier(SharedAddress(&shared.entries_here[n % kMlaStages]), n / kMlaStages & 1);
}

// The query's latent part, in place, from bf16 to fp16 / kMlaUnit. By the warpgroup.
__device__ __forceinline__ void ConvertQuery(MlaShared& shared) {
  constexpr int kPieces = kPackedRank / 64 * kMlaColumnBlockBytes / 16;
  auto* const pieces = reinterpret_cast<uint4*>(shared.query);
  const auto convert = [](uint32_t pair) {
    return PackFp16(__uint_as_float(pair << 16) / kMlaUnit,
                    __uint_as_float(pair & 0xffff0000u) / kMlaUnit);
  };
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kPieces; i += kMlaWarpgroup) {
    const uint4 v = pieces[i];
    pieces[i] = {convert(v.x), convert(v.y), convert(v.z), convert(v.w)};
  }
  PublishToAsyncProxy();
  SyncWarpgroup(1);
}

// Starts the products of the n-th tile's entries and the query, once the tile is there.
__device__ __forceinline__ void StartScores(float (&score)[32], MlaShared& shared, uint32_t n) {
  const uint32_t query = SharedAddress(shared.query);
  const uint32_t keys = SharedAddress(shared.entries[n % kMlaStages]);
  WaitForEntries(shared, n);
  BeginProducts();
#pragma unroll
  for (int step = 0; step < kMlaWidth / 16; ++step) {
    const auto at = static_cast<uint32_t>(step / 4 * kMlaColumnBlockBytes + step % 4 * 32);
    const uint64_t q = TileDescriptor(query + at), k = TileDescriptor(keys + at);
    if (step < kPackedRank / 16) {
      MultiplyTiles<Operand::kFp16>(score, q, k, step > 0);
    } else {
      MultiplyTiles(score, q, k, 1);
    }
  }
  CommitProducts();
}

__device__ void ScoreTiles(const SparseMlaParams& p, const MlaShape& shape, MlaShared& shared) {
  const float scale = p.scale * kLog2E;
  // Tiles, what was handed to the adder, and queries so far.
  uint32_t n = 0, handed = 0, queries = 0;
  bool has_query = false;  // of this row
  float o[128];
  for (bool first = true;; first = false) {
    const MlaPiece& piece = NextPiece(p, shape, shared, first);
    if (piece.row < 0) return;
    Softmax state[2] = {{NegativeInfinity(), 0.0f}, {NegativeInfinity(), 0.0f}};
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0;
    if (piece.entries > 0 && !has_query) {
      WaitBarrier(SharedAddress(&shared.query_here), queries++ & 1);
      ConvertQuery(shared);
      has_query = true;
    }
    for (int entries = piece.entries; entries > 0; entries -= kMlaTileEntries, ++n) {
      const uint32_t stage = n % kMlaStages;
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
        weights[i] = {PackFp16(from[0], from[1]), PackFp16(from[2], from[3]),
                      PackFp16(from[4], from[5]), PackFp16(from[6], from[7])};
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
    Unscale(o);
    FinishPiece(p, shape, piece, o, state);
  }
}

__device__ void AddTiles(const SparseMlaParams& p, const MlaShape& shape, MlaShared& shared) {
  const int thread = static_cast<int>(threadIdx.x) % kMlaWarpgroup;
  uint32_t n = 0, taken = 0;
  float o[128];
  for (bool first = true;; first = false) {
    const MlaPiece& piece = NextPiece(p, shape, shared, first);
    if (piece.row < 0) return;
    Softmax state[2] = {{NegativeInfinity(), 0.0f}, {NegativeInfinity(), 0.0f}};
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0;
    for (int entries = piece.entries; entries > 0; entries -= kMlaTileEntries, ++n) {
      const uint32_t stage = n % kMlaStages;
      WaitBarrier(SharedAddress(&shared.weights_here), taken++ & 1);
      uint4 weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[i] = shared.weights[i][thread];
      const float2 keep = shared.keep[thread];
      ArriveWarp(shared.weights_done);
      Keep(o, keep);
      WaitForEntries(shared, n);
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
    Unscale(o);
    FinishPiece(p, shape, piece, o, state);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    PackedMlaKernel(const __grid_constant__ SparseMlaParams p,
                    const __grid_constant__ CUtensorMap map, MlaShape shape) {
  extern __shared__ __align__(1024) unsigned char memory[];
  MlaShared& shared = *reinterpret_cast<MlaShared*>(memory);
  if (threadIdx.x == 0) {
    PrefetchMap(&map);
    InitBarrier(SharedAddress(&shared.query_here), 1);
    InitBarrier(SharedAddress(&shared.query_done), 4);  // warps
    for (int i = 0; i < kMlaStages; ++i) {
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
  const int role = static_cast<int>(threadIdx.x) / kMlaWarpgroup;
  if (role < 2 && threadIdx.x % kMlaWarpgroup == 0) shared.positions[role] = walk.position();
  if (role >= 2 && threadIdx.x % 32 == 0) {
    shared.tiles[threadIdx.x / 32 - 2 * kMlaWarpgroup / 32].Start(p, walk.position());
  }
  if (role >= 2) {
    GiveRegisters<kUnpackerRegisters>();
    UnpackTiles(p, shape, map, shared);
  } else if (role == 1) {
    TakeRegisters<kAdderRegisters>();
    AddTiles(p, shape, shared);
  } else {
    TakeRegisters<kScorerRegisters>();
    ScoreTiles(p, shape, shared);
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

// How many groups `rows` rows can use of so many processors.
int64_t Groups(int64_t rows, int32_t heads, int64_t capacity, bool two, int processors) {
  return std::min<int64_t>(std::max(1, processors / (heads / kMlaHeads)),
                           rows * std::max(1, MlaPieces(capacity, two)));
}

}  // namespace

bool HasPackedKernel(const SparseMlaParams& p) {
  const PagedLatents& c = p.cache;
  return c.type == DType::kFloat8E4M3 && c.block_tokens > 1 && p.q_type == DType::kBFloat16 &&
         p.heads % kMlaHeads == 0 && p.heads <= kMaxPackedHeads &&
         c.page_bytes == int64_t{c.block_tokens} * kPackedEntryBytes &&
         (p.then_counts == nullptr || p.capacity <= kMlaMostOfTwo) &&
         AreAligned(16, p.q, c.base, p.scratch) && AreAligned(8, p.out, p.other_o);
}

cudaError_t LaunchPackedSparseMla(const SparseMlaParams& p, cudaStream_t stream) {
  const auto block_tokens = static_cast<uint32_t>(p.cache.block_tokens);
  const bool two = p.then_counts != nullptr;
  MlaShape shape = {p.heads / kMlaHeads, MlaSlots(p.capacity, two),
                    static_cast<uint32_t>(((uint64_t{1} << 32) + block_tokens - 1) / block_tokens)};
  int64_t groups = Groups(p.rows, p.heads, p.capacity, two, Processors() - p.spare_processors);
  if (shape.slots > 0) {
    const int64_t slots = p.scratch_bytes / (shape.head_tiles * kMlaSlotBytes);
    if (slots == 0) return cudaErrorInvalidValue;
    groups = std::max<int64_t>(1, std::min(groups, slots / shape.slots));
    if (groups == 1) shape.slots = two ? 2 : 1;  // No row is cut.
  }
  cudaError_t error =
      cudaFuncSetAttribute(PackedMlaKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(sizeof(MlaShared)));
  if (error != cudaSuccess) return error;
  // The same split of an SM's memory for both: changing it between kernels drains the SM.
  error = cudaFuncSetAttribute(CombineMlaKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  CUtensorMap map;
  error = MakeTileMap(p.q, p.rows * p.heads, kMlaWidth, kMlaHeads, &map);
  if (error != cudaSuccess) return error;
  error = LaunchKernel(PackedMlaKernel, dim3(static_cast<unsigned>(groups * shape.head_tiles)),
                       dim3(kThreads), sizeof(MlaShared), stream, p, map, shape);
  if (error != cudaSuccess || shape.slots == 0 || groups == 1) return error;
  const dim3 blocks(static_cast<unsigned>(groups - 1), static_cast<unsigned>(shape.head_tiles),
                    kMlaParts);
  return LaunchKernel(CombineMlaKernel, blocks, dim3(kMlaAdders), 0, stream, p, shape,
                      static_cast<int>(groups));
}

int64_t SparseMlaScratchBytes(int32_t max_decode_rows, int32_t heads, int32_t rank,
                              int64_t capacity) {
  if (rank != kPackedRank || heads % kMlaHeads != 0 || heads > kMaxPackedHeads) return 0;
  return Groups(max_decode_rows, heads, capacity, true, Processors()) * (heads / kMlaHeads) *
         MlaSlots(capacity, true) * kMlaSlotBytes;
}

}  // namespace sluice::kernels::cuda
