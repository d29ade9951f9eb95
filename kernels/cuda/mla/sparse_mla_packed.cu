// Latent attention over lists of packed entries, for decode rows and rows of prompts alike.
//
// A block computes 64 heads of a row; mla_plan.cuh says which pieces of which rows it takes. It
// has four warpgroups. Two, the unpackers, unpack entries, 64 at a time, to fp16 in shared
// memory, which holds two such tiles. One, the scorer, computes scores, their softmax and the
// result's first 256 columns. The last one, the adder, computes the other 256 columns, with
// weights that the scorer passes to it in shared memory. The result lies in registers, 128 of
// each thread.
//
// Bytes: 656 of each (row, entry) once from HBM, and heads / 64 - 1 times more from L2; sums of a
// piece, 128 KB a block, to L2 and back if a row has several pieces. Operations: 2 * 1088 * heads
// a (row, entry): the floor at 990 TFLOP/s, with 2,048 entries and 128 heads, is 0.58 us a row,
// 74 us for 128 rows. On an SM a tile takes the tensor cores 2,176 cycles (1,152 for scores,
// 1,024 for values) and shared memory 2,800 (360 KB: 208 read by products, 138 by the unpackers;
// 128 bytes a cycle).
//
// Measured on an H200 (sluice-mla-bench), 128 heads, 2,048 entries, 1 / 8 / 32 / 64 / 128 rows:
// 32 / 35 / 69 / 118 / 227 us. A tile takes the scorer some 4,600 cycles: 2,000 are scores, which
// share shared memory with the unpackers, 1,300 their softmax, 900 values. A fold of pieces takes
// 10,000.
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/tensor_map.h"
#include "kernels/cuda/common/warpgroup.cuh"
#include "kernels/cuda/mla/mla_block.cuh"
#include "kernels/cuda/mla/mla_internal.h"
#include "kernels/cuda/mla/mla_products.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 2 * kMlaWarpgroup + 32 * kMlaUnpackWarps;
// Registers of a thread in each role. Their sum is that of the 128 which each of 512 threads may
// have. The compiler keeps products asynchronous only if every role states its number.
constexpr int kSumRegisters = 200;  // scorer and adder
constexpr int kUnpackerRegisters = 56;

// Returns the piece at the walk's position, as scorer and adder see it.
__device__ __forceinline__ MlaPiece PieceOf(const MlaWalk& walk, const MlaShape& shape) {
  if (walk.done()) return {-1};
  const bool from_start = walk.first_piece() == 0, of_first = walk.IsOfFirst();
  const int before = of_first ? 0 : walk.first_pieces();  // pieces of the other list
  return {walk.row(),
          walk.slot(),
          walk.entries(),
          !from_start ? walk.piece() - walk.first_piece()
          : of_first  ? MlaFirstTotal(shape.slots, walk.row())
                      : MlaTotal(shape.slots),
          from_start && walk.piece() > before,
          from_start && of_first && walk.piece() + 1 == walk.first_pieces(),
          from_start && walk.IsLast(),
          from_start && before > 0};
}

// Publishes piece k. One thread of the adder calls it, one piece ahead: the adder waits for
// weights most of the time.
__device__ __forceinline__ void MakePiece(const SparseMlaParams& p, const MlaShape& shape,
                                          MlaShared& shared, uint32_t k) {
  if (k >= 2) WaitBarrier(SharedAddress(&shared.pieces_done[k % 2]), (k / 2 - 1) & 1);
  MlaWalk walk(p, shared.position);
  if (k > 0) {
    walk.Next();
    shared.position = walk.position();
  }
  shared.pieces[k % 2] = PieceOf(walk, shape);
  Arrive(SharedAddress(&shared.pieces_here[k % 2]));
}

// Returns the descriptor of the n-th tile's values, from a block of 64 columns on.
__device__ __forceinline__ uint64_t ValuesOf(MlaShared& shared, uint32_t n, int column_block) {
  const uint32_t tile = SharedAddress(shared.entries[n % kMlaStages]);
  return Uniform(TileDescriptor(tile + static_cast<uint32_t>(column_block * kMlaColumnBlockBytes),
                                kMlaColumnBlockBytes));
}

// Waits for the n-th tile's entries.
__device__ __forceinline__ void WaitForEntries(MlaShared& shared, uint32_t n) {
  WaitBarrier(SharedAddress(&shared.entries_here[n % kMlaStages]), n / kMlaStages & 1);
}

// Converts the query's latent part in place, from bf16 to fp16 / kMlaUnit. The whole warpgroup
// calls it.
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
  SyncThreads(kScorerBarrier, kMlaWarpgroup);
}

// Starts the products of the n-th tile's entries and the query, once the tile is there.
__device__ __forceinline__ void StartScores(float (&score)[32], MlaShared& shared, uint32_t n) {
  const uint64_t query = Uniform(TileDescriptor(SharedAddress(shared.query)));
  const uint64_t keys = Uniform(TileDescriptor(SharedAddress(shared.entries[n % kMlaStages])));
  WaitForEntries(shared, n);
  BeginProducts();
#pragma unroll
  for (int step = 0; step < kMlaWidth / 16; ++step) {
    const int at = step / 4 * kMlaColumnBlockBytes + step % 4 * 32;
    const uint64_t q = TileFrom(query, at), k = TileFrom(keys, at);
    if (step < kPackedRank / 16) {
      MultiplyTiles<Operand::kFp16>(score, q, k, step > 0);
    } else {
      MultiplyTiles(score, q, k, 1);
    }
  }
  CommitProducts();
}

// A warpgroup's progress.
struct MlaTurn {
  uint32_t n = 0, queries = 0;  // tiles and queries so far
};

// Returns the first head of a scorer's or adder's thread; its other head is 8 further.
__device__ __forceinline__ int HeadOfThread() {
  return MlaThread{static_cast<int>(threadIdx.x)}.Head(0);
}

// The scorer's part of a piece: its softmax, and the sums of 256 columns.
__device__ __forceinline__ void ScoreTiles(const SparseMlaParams& p, const MlaPiece& piece,
                                           MlaShared& shared, MlaTurn& turn, float (&o)[128],
                                           Softmax (&state)[2]) {
  const float scale = p.scale * kLog2E;
  const int head = HeadOfThread();
  const MlaTile* const ring = shared.tiles.ring;
  for (int entries = piece.entries; entries > 0; entries -= kMlaTileEntries) {
    const uint32_t n = turn.n++, stage = n % kMlaStages;
    const bool is_last = entries <= kMlaTileEntries;
    const uint64_t values = ValuesOf(shared, n, 0);
    // A tile's record in the ring is written before the entries of the tile before it arrive.
    if (n == 0 || ring[n % MlaTiles::kRing].is_first) {
      WaitBarrier(SharedAddress(&shared.query_here), turn.queries++ & 1);
      ConvertQuery(shared);
    }
    float score[32];
    StartScores(score, shared, n);
    WaitForProducts<0>();
    // The query is released if the next tile belongs to another row. The next tile's record is
    // valid: the warps that load queries have known of it since before they loaded this tile.
    if (is_last && ring[(n + 1) % MlaTiles::kRing].row != piece.row) ArriveWarp(shared.query_done);
    const float2 keep = Weigh(score, state, scale, entries);
    uint4 weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const from = score + 8 * i;
      weights[i] = {PackFp16(from[0], from[1]), PackFp16(from[2], from[3]),
                    PackFp16(from[4], from[5]), PackFp16(from[6], from[7])};
    }
    if (is_last) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        state[h].l += __shfl_xor_sync(0xffffffffu, state[h].l, 1);
        state[h].l += __shfl_xor_sync(0xffffffffu, state[h].l, 2);
      }
    }
    if (n > 0) WaitBarrier(SharedAddress(&shared.weights_done), (n - 1) & 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) shared.weights[i][threadIdx.x] = weights[i];
    if (threadIdx.x % 4 == 0) {
      shared.keep[head] = keep.x;
      shared.keep[head + 8] = keep.y;
      if (is_last) {
        shared.softmax[head] = state[0];
        shared.softmax[head + 8] = state[1];
      }
    }
    ArriveWarp(shared.weights_here);
    Keep(o, keep);
    AddValues(o, weights, values);
    WaitForProducts<0>();
    ArriveWarp(shared.entries_done[stage]);
  }
}

// The adder's part: the sums of the other 256 columns.
__device__ __forceinline__ void AddTiles(const MlaPiece& piece, MlaShared& shared, MlaTurn& turn,
                                         float (&o)[128], Softmax (&state)[2]) {
  const int thread = static_cast<int>(threadIdx.x) % kMlaWarpgroup, head = HeadOfThread();
  for (int entries = piece.entries; entries > 0; entries -= kMlaTileEntries) {
    const uint32_t n = turn.n++, stage = n % kMlaStages;
    const uint64_t values = ValuesOf(shared, n, 4);
    WaitBarrier(SharedAddress(&shared.weights_here), n & 1);
    uint4 weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] = shared.weights[i][thread];
    const float2 keep = {shared.keep[head], shared.keep[head + 8]};
    if (entries <= kMlaTileEntries) {
      state[0] = shared.softmax[head];
      state[1] = shared.softmax[head + 8];
    }
    ArriveWarp(shared.weights_done);
    Keep(o, keep);
    WaitForEntries(shared, n);
    AddValues(o, weights, values);
    WaitForProducts<0>();
    ArriveWarp(shared.entries_done[stage]);
  }
}

// Prefetches to L2 the result with which a row's is merged. The adder calls it.
__device__ __forceinline__ void FetchOther(const SparseMlaParams& p, const MlaShape& shape,
                                           int row) {
  if (p.other_o == nullptr || p.then_counts != nullptr) return;
  constexpr int kLine = 128 / sizeof(float);
  const int head = static_cast<int>(blockIdx.x) % shape.head_tiles * kMlaHeads;
  const float* const from = p.other_o + (int64_t{row} * p.heads + head) * kPackedRank;
  for (int line = static_cast<int>(threadIdx.x) % kMlaWarpgroup;
       line < kMlaHeads * kPackedRank / kLine; line += kMlaWarpgroup) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + line * kLine));
  }
}

// The loop of scorer and adder. A piece's end is the same code for both.
__device__ __forceinline__ void SumPieces(const SparseMlaParams& p, const MlaShape& shape,
                                          MlaShared& shared) {
  const bool scores = threadIdx.x < kMlaWarpgroup;
  MlaTurn turn;
  float o[128];
  for (uint32_t k = 0;; ++k) {
    const MlaPiece& piece = shared.pieces[k % 2];
    WaitBarrier(SharedAddress(&shared.pieces_here[k % 2]), k / 2 & 1);
    if (piece.row < 0) return;
    Softmax state[2] = {{NegativeInfinity(), 0.0f}, {NegativeInfinity(), 0.0f}};
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0;
    if (scores) {
      ScoreTiles(p, piece, shared, turn, o, state);
    } else {
      if (threadIdx.x == kMlaWarpgroup) MakePiece(p, shape, shared, k + 1);
      __syncwarp();
      if (piece.finishes) FetchOther(p, shape, piece.row);
      AddTiles(piece, shared, turn, o, state);
    }
    FinishPiece(p, shape, piece, o, state);
    ArriveWarp(shared.pieces_done[k % 2]);
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
    for (int i = 0; i < 2; ++i) {
      InitBarrier(SharedAddress(&shared.pieces_here[i]), 1);
      InitBarrier(SharedAddress(&shared.pieces_done[i]), 8);
    }
  }
  PublishBarriers();
  __syncthreads();
  // With then_arrives, what the kernel before this one brings is waited for where it is read;
  // everything before that kernel is done.
  if (!p.then_arrives) WaitForPriorKernels();
  LetNextKernelStart();  // the combining kernel relies on this order
  const int thread = static_cast<int>(threadIdx.x);
  // One warp computes where tiles begin, and one where pieces begin.
  const bool makes_tiles = thread / 32 == 2 * kMlaWarpgroup / 32;
  if (makes_tiles || thread / 32 == kMlaWarpgroup / 32) {
    MlaWalk walk(p);
    EnterGroup(p, static_cast<int>(blockIdx.x) / shape.head_tiles,
               static_cast<int>(gridDim.x) / shape.head_tiles, walk);
    walk.Settle();
    if (thread % 32 == 0) {
      if (makes_tiles) {
        shared.tiles.Start(p, walk.position());
      } else {
        shared.position = walk.position();
        MakePiece(p, shape, shared, 0);
      }
    }
    __syncwarp();
  }
  if (thread >= 2 * kMlaWarpgroup) {
    GiveRegisters<kUnpackerRegisters>();
    UnpackTiles(p, shape, map, shared);
  } else {
    TakeRegisters<kSumRegisters>();
    SumPieces(p, shape, shared);
  }
  // Waits for the sake of the kernels that follow, even if nothing of the block arrives
  // (launch.cuh).
  if (p.then_arrives) WaitForPriorKernels();
}

// Returns the processors of the current device; 0 if there is none.
int Processors() {
  int device = 0, processors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 0;
  }
  return processors;
}

// Returns how many groups `rows` rows can use on that many processors.
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
         AreAligned(16, p.q, c.base, p.scratch, p.out, p.other_o);
}

cudaError_t LaunchPackedSparseMla(const SparseMlaParams& p, cudaStream_t stream) {
  const auto block_tokens = static_cast<uint32_t>(p.cache.block_tokens);
  const bool two = p.then_counts != nullptr;
  MlaShape shape = {p.heads / kMlaHeads, MlaSlots(p.capacity, two),
                    static_cast<uint32_t>(((uint64_t{1} << 32) + block_tokens - 1) / block_tokens)};
  int64_t groups = Groups(p.rows, p.heads, p.capacity, two, Processors() - p.spare_processors);
  if (shape.slots > 0) {
    const int64_t slots = p.scratch_bytes / (shape.head_tiles * kMlaSlotBytes);
    if (slots < MlaTotals(two)) return cudaErrorInvalidValue;
    groups = std::max<int64_t>(1, std::min(groups, slots / shape.slots));
    if (groups == 1) shape.slots = MlaTotals(two);  // no row is cut
  }
  cudaError_t error =
      cudaFuncSetAttribute(PackedMlaKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(sizeof(MlaShared)));
  if (error != cudaSuccess) return error;
  // Both kernels ask for the same split of an SM's memory: changing it between kernels drains the
  // SM.
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
