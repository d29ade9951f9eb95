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
// (1,152 for scores, 1,024 for values) and shared memory 2,300 (221 KB read by products, 72 KB
// written, 128 bytes a cycle).
//
// Measured on an H200 (sluice-mla-bench), 128 heads, 2,048 entries, 1 / 8 / 32 / 64 / 128 rows: 48
// / 52 / 106 / 192 / 370 us. A tile takes 11,000 cycles: 8,000 of them the products wait for
// entries, whether these are converted by the processor's cvt or by moving bits; 3,300 are scores
// (1,450), their softmax (850), values (700) and what is between them.
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
#ifndef MLA_R0
#define MLA_R0 200
#endif
constexpr int kWorkerRegisters = MLA_R0;
constexpr int kUnpackerRegisters = 504 - 2 * kWorkerRegisters;

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

// Keeps what the compiler does to these registers on its side of the products around it.
template <int kSize>
__device__ __forceinline__ void Pin(float (&v)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(v[i])::"memory");
}

// Adds the weighted values of a tile to a warpgroup's 256 columns.
__device__ __forceinline__ void AddValues(float (&o)[128], uint32_t weights, uint32_t values) {
  Pin(o);
  BeginProducts();
#pragma unroll
  for (uint32_t step = 0; step < kMlaTileEntries / 16; ++step) {
    MultiplyRows(o, TileDescriptor(weights + step * 32),
                 TileDescriptor(values + step * 16 * 128, kMlaColumnBlockBytes));
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
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    state[h] = {m, fmaf(state[h].l, keep[h], sum)};
  }
  return {keep[0], keep[1]};
}

// Waits for the n-th tile's entries.
__device__ __forceinline__ void WaitForEntries(MlaShared& shared, uint32_t n) {
  WaitBarrier(SharedAddress(&shared.entries_here[n % kMlaStages]), n / kMlaStages & 1);
  PublishToAsyncProxy();  // What others wrote, as their barrier says.
}

// The query's latent part, in place, from bf16 to fp16 / kMlaUnit. By both warpgroups.
__device__ __forceinline__ void ConvertQuery(MlaShared& shared) {
  constexpr int kPieces = kPackedRank / 64 * kMlaColumnBlockBytes / 16;
  auto* const pieces = reinterpret_cast<uint4*>(shared.query);
  const auto convert = [](uint32_t pair) {
    return PackFp16(__uint_as_float(pair << 16) / kMlaUnit,
                    __uint_as_float(pair & 0xffff0000u) / kMlaUnit);
  };
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < kPieces; i += kMlaAdders) {
    const uint4 v = pieces[i];
    pieces[i] = {convert(v.x), convert(v.y), convert(v.z), convert(v.w)};
  }
  PublishToAsyncProxy();
  SyncThreads(3, kMlaAdders);
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

// Starts to add the values of tile n to the warpgroup's columns.
__device__ __forceinline__ void StartValues(MlaShared& shared, uint32_t n, int group,
                                            float (&o)[128], float2 keep) {
  Keep(o, keep);
  AddValues(o, SharedAddress(shared.weights),
            SharedAddress(shared.entries[n % kMlaStages]) +
                static_cast<uint32_t>(group * 4 * kMlaColumnBlockBytes));
}

// The same, with the other warpgroup's weights, once they are there.
__device__ __forceinline__ void StartTheirs(MlaShared& shared, uint32_t n, int group,
                                            float (&o)[128], Softmax (&state)[2]) {
  const int row = MlaThread{static_cast<int>(threadIdx.x)}.Head(0);
  WaitBarrier(SharedAddress(&shared.weights_here[n % 2]), n / 2 & 1);
  const float4 a = shared.states[row], b = shared.states[row + 8];
  state[0] = {a.x, a.y};
  state[1] = {b.x, b.y};
  StartValues(shared, n, group, o, {a.z, b.z});
}

// Their end.
__device__ __forceinline__ void FinishValues(MlaShared& shared, uint32_t n, float (&o)[128]) {
  WaitForProducts<0>();
  Pin(o);
  ArriveWarp(shared.entries_done[n % kMlaStages]);
}

// Hands the weights of tile n to both warpgroups, and adds its values.
__device__ __forceinline__ void AddOurs(MlaShared& shared, uint32_t n, int group, float (&o)[128],
                                        const float (&score)[32], const Softmax (&state)[2],
                                        float2 keep) {
  const int thread = static_cast<int>(threadIdx.x) % kMlaWarpgroup, lane = thread % 32;
  // Row and piece of 16 bytes where the lane's row of four blocks of [8][8] lies.
  const int row = thread / 32 * 16 + lane % 16, piece = lane / 16;
  const uint32_t to = SharedAddress(shared.weights) + static_cast<uint32_t>(row * 128);
  if (n > 0) WaitBarrier(SharedAddress(&shared.weights_done), (n - 1) & 1);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* const from = score + 8 * i;
    StoreMatrices(to + static_cast<uint32_t>(((2 * i + piece) ^ (row % 8)) * 16),
                  {PackFp16(from[0], from[1]), PackFp16(from[2], from[3]),
                   PackFp16(from[4], from[5]), PackFp16(from[6], from[7])});
  }
  if (lane % 4 == 0) {
    float4* const states = shared.states + MlaThread{thread}.Head(0);
    states[0] = {state[0].m, state[0].l, keep.x, 0.0f};
    states[8] = {state[1].m, state[1].l, keep.y, 0.0f};
  }
  PublishToAsyncProxy();
  ArriveWarp(shared.weights_here[n % 2]);
  MLA_MARK(group, n, 4);
  WaitBarrier(SharedAddress(&shared.weights_here[n % 2]), n / 2 & 1);
  StartValues(shared, n, group, o, keep);
  FinishValues(shared, n, o);
  ArriveWarp(shared.weights_done);
  MLA_MARK(group, n, 5);
}

__device__ void WorkOnTiles(const SparseMlaParams& p, const MlaShape& shape, MlaShared& shared,
                            int group) {
  const float scale = p.scale * kLog2E;
  uint32_t n = 0, queries = 0;
  bool has_query = false;  // of this row
  float o[128];
  for (bool first = true;; first = false) {
    const MlaPiece& piece = NextPiece(p, shape, shared, first);
    if (piece.row < 0) return;
    Softmax state[2] = {{NegativeInfinity(), 0.0f}, {NegativeInfinity(), 0.0f}};
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0;
    int entries = piece.entries;
    if (entries > 0 && !has_query) {
      WaitBarrier(SharedAddress(&shared.query_here), queries++ & 1);
      ConvertQuery(shared);
      has_query = true;
    }
    if (entries > 0 && n % 2 == static_cast<uint32_t>(group)) {
      float score[32];
      StartScores(score, shared, n);
      WaitForProducts<0>();
      if (entries <= 2 * kMlaTileEntries && piece.ends_row) ArriveWarp(shared.query_done);
      const float2 keep = Weigh(score, state, scale, entries);
      AddOurs(shared, n, group, o, score, state, keep);
      ++n;
      entries -= kMlaTileEntries;
    } else if (entries > 0 && entries <= kMlaTileEntries && piece.ends_row) {
      ArriveWarp(shared.query_done);
    }
#pragma unroll 1
    for (; entries > kMlaTileEntries; n += 2, entries -= 2 * kMlaTileEntries) {
      float score[32];
      MLA_MARK(group, n + 1, 0);
      StartScores(score, shared, n + 1);
      MLA_MARK(group, n + 1, 1);
      StartTheirs(shared, n, group, o, state);
      WaitForProducts<1>();
      MLA_MARK(group, n + 1, 2);
      Pin(score);
      if (entries <= 3 * kMlaTileEntries && piece.ends_row) ArriveWarp(shared.query_done);
      const float2 keep = Weigh(score, state, scale, entries - kMlaTileEntries);
      FinishValues(shared, n, o);
      MLA_MARK(group, n + 1, 3);
      AddOurs(shared, n + 1, group, o, score, state, keep);
    }
    if (entries > 0) {
      StartTheirs(shared, n, group, o, state);
      FinishValues(shared, n, o);
      ++n;
    }
    if (piece.ends_row) has_query = false;
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] *= 1.0f / kMlaUnit;
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
    InitBarrier(SharedAddress(&shared.query_done), 8);  // warps
    for (int i = 0; i < kMlaStages; ++i) {
      InitBarrier(SharedAddress(&shared.entries_here[i]),
                  kMlaUnpackWarps * 33);  // warps and their lanes
      InitBarrier(SharedAddress(&shared.entries_done[i]), 8);
    }
    for (uint64_t& here : shared.weights_here) InitBarrier(SharedAddress(&here), 4);
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
  } else {
    TakeRegisters<kWorkerRegisters>();
    WorkOnTiles(p, shape, shared, role);
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
  int64_t groups =
      Groups(p.rows, p.heads, p.capacity, two, Processors() - p.spare_processors);
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
