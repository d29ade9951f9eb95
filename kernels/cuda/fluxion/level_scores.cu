// Scores of blocks for single query heads: the largest dot product of a query and the pieces of a
// digest row, and where rows have a spread, deviations by its dot product with the query's squares.
//
// The kernel moves each digest row once for all query heads of a group of up to 8, 5 * head_dim
// bytes with a spread: 210 MB for 10 rows of Qwen3-14B at 64K and blocks of 16 tokens (8 KV heads,
// 4,096 blocks), whose floor is 44 us at 4.8 TB/s. Digests may also lie in pinned host memory:
// every load has 16 bytes, and four lanes take 64 neighbouring ones.
//
// As in select/digest_scores.cu, the A operand of a tensor-core tile is 16 digest rows, straight
// from memory. A lane loads 16 bytes of two rows at a time, which it widens to fp16: they are 4 of
// its elements in each of 4 steps of k. The position of an element does not matter as long as the
// queries, the B operand, have it in the same one. Columns are 8 query heads. An element of a query
// is the sum of two fp16, 22 bits of it, and so is its square times a power of two that keeps the
// squares of a query within fp16. Pieces come one after the other, and a finished one leaves the
// largest product so far; the spread is last. Warps take one block at a time where head_dim is not
// a multiple of a segment, which only tests have on a GPU.
//
// Only the device knows how many rows a list has. The grid has so many thread blocks for each list
// that few lists fill the machine too; they take tiles in turn, and those behind the list's end are
// over at once. Tiles begin at multiples of 16 rows, so that all rows of a block lie in one of
// them. Each score is a chain of its own, whichever thread block computes it.
#include <algorithm>

#include <cuda_fp16.h>

#include "kernels/cuda/common/attention_tile.cuh"
#include "kernels/cuda/common/float8.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/fluxion/level_list.cuh"
#include "kernels/cuda/select/group_scores.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileHeads = 8;
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 5;
constexpr int kSegment = 64;  // elements, and bytes, of a row that four lanes load at a time
constexpr int kMaxDim = 256;
constexpr int kSteps = 4;       // steps of k, of 16 elements each, in a segment
constexpr int kListParts = 16;  // the most thread blocks of a list, where lists fill the machine

// Splits two floats into fp16 pairs whose sum keeps 22 bits of each, but for those below 2^-24.
__device__ __forceinline__ void SplitFp16(float x, float y, uint32_t& high, uint32_t& low) {
  const __half2 upper = __floats2half2_rn(x, y);
  const float2 kept = __half22float2(upper);
  const __half2 lower = __floats2half2_rn(x - kept.x, y - kept.y);
  high = *reinterpret_cast<const uint32_t*>(&upper);
  low = *reinterpret_cast<const uint32_t*>(&lower);
}

// Squares are multiplied by this, and their sums by its inverse: elements of queries up to 4,096,
// which no model exceeds, have squares within fp16. A larger one has a sum that is not a number,
// and Deviations makes 0 of it.
constexpr float kSquareScale = 0x1p-9f;

// Returns what a row's spread adds to its best piece, from the product of squares and spread.
__device__ __forceinline__ float Deviations(float spread) {
  return kFluxionDeviations * sqrtf(fmaxf(spread, 0.0f));
}

// Puts the B operands of up to 8 heads: 32 lanes for each 16 positions of k, upper and lower parts;
// those of the queries first, and then, if `squares`, those of their squares. The whole thread
// block calls it.
__device__ void PutQueries(const float* q, int heads, int dim, bool squares, uint4* queries) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const float* const of_head = q + min(lane / 4, heads - 1) * dim;
  const int steps = dim / 16;
  for (int step = warp; step < (squares ? 2 : 1) * steps; step += kWarps) {
    const int in_query = step % steps;
    const int element = in_query / kSteps * kSegment + lane % 4 * 16 + in_query % kSteps * 4;
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v[j] = lane / 4 < heads ? of_head[element + j] : 0.0f;
      if (step >= steps) v[j] *= v[j] * kSquareScale;
    }
    uint4 operand;
    SplitFp16(v[0], v[1], operand.x, operand.z);
    SplitFp16(v[2], v[3], operand.y, operand.w);
    queries[step * 32 + lane] = operand;
  }
}

// A lane's place in 16 digest rows: rows lane / 4 and lane / 4 + 8.
struct TileRows {
  const uint4* upper;
  const uint4* lower;

  // The tile's rows that are not the list's repeat its first or its last row, and count nowhere.
  __device__ TileRows(const PagedRows& digests, const LevelList& list, int tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = tile * kTileRows + lane / 4;
    upper = Of(digests, list, row) + lane % 4;
    lower = Of(digests, list, row + 8) + lane % 4;
  }

 private:
  __device__ static const uint4* Of(const PagedRows& digests, const LevelList& list, int row) {
    return reinterpret_cast<const uint4*>(RowAt<uint8_t>(
        digests, list.slot, min(max(row, list.row_begin), list.row_end - 1), list.kv_head));
  }
};

// Loaded segments of a lane's two rows. kSegments of a row are under way together.
template <int kSegments>
struct Segments {
  uint4 upper[kSegments], lower[kSegments];

  // Loads segments [first, first + kSegments) of those that a row has.
  __device__ __forceinline__ void Load(const TileRows& rows, int first, int segments) {
#pragma unroll
    for (int j = 0; j < kSegments; ++j) {
      if (first + j >= segments) continue;
      upper[j] = LoadOnce(rows.upper + (first + j) * 4);
      lower[j] = LoadOnce(rows.lower + (first + j) * 4);
    }
  }
};

// Sums of a tile's piece or spread, and the scores by what came before: [0, 1] are of row lane / 4
// and heads lane % 4 * 2 and the next, [2, 3] of the other row.
struct TileSums {
  float even[4] = {}, odd[4] = {}, low_even[4] = {}, low_odd[4] = {};
  float best[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};

  // Adds segments [first, first + kSegments) of those that a row has. A piece has `of_piece`.
  template <int kSegments>
  __device__ __forceinline__ void Add(const Segments<kSegments>& rows, int first, int segments,
                                      int of_piece, const uint4* queries) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < kSegments; ++j) {
      if (first + j >= segments) continue;
      const int in_piece = (first + j) % of_piece;
      const bool is_spread = first + j >= kDigestPieces * of_piece;
      const uint4* const operands =
          queries + 32 * kSteps * (is_spread ? of_piece + in_piece : in_piece) + lane;
      const uint32_t upper[kSteps] = {rows.upper[j].x, rows.upper[j].y, rows.upper[j].z,
                                      rows.upper[j].w};
      const uint32_t lower[kSteps] = {rows.lower[j].x, rows.lower[j].y, rows.lower[j].z,
                                      rows.lower[j].w};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint4 b = operands[32 * step];
        const uint2 of_upper = WidenE4M3(upper[step]), of_lower = WidenE4M3(lower[step]);
        const uint32_t a[4] = {of_upper.x, of_lower.x, of_upper.y, of_lower.y};
        MultiplyAddFp16(step % 2 == 0 ? even : odd, a, b.x, b.y);
        MultiplyAddFp16(step % 2 == 0 ? low_even : low_odd, a, b.z, b.w);
      }
      if (in_piece == of_piece - 1) EndVector(is_spread);
    }
  }
  // Gives every row of a block the largest of its 2^fold rows. The whole warp calls it.
  __device__ __forceinline__ void Fold(int fold) {
    for (int i = 0; i < fold; ++i) {
#pragma unroll
      for (float& x : best) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4 << i));
    }
  }

 private:
  __device__ __forceinline__ void EndVector(bool is_spread) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = (even[i] + odd[i]) + (low_even[i] + low_odd[i]);
      best[i] = is_spread ? best[i] + Deviations(sum / kSquareScale) : fmaxf(best[i], sum);
      even[i] = odd[i] = low_even[i] = low_odd[i] = 0;
    }
  }
};

// A lane's two columns of scores: those of the heads lane % 4 * 2 and the next; null where a head
// has none.
struct Columns {
  float* of[2];

  __device__ Columns(const LevelScoresParams& p, const LevelList& list, int first_head, int heads) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int in_tile = static_cast<int>(threadIdx.x) % 4 * 2 + i, head = first_head + in_tile;
      const bool wanted = in_tile < heads && list.Wants(p, head);
      of[i] = wanted ? p.scores + (int64_t{list.row} * p.heads + head) * p.score_stride : nullptr;
    }
  }
  __device__ __forceinline__ void Put(const TileSums& sums, int tile, const LevelList& list) const {
    const int row = tile * kTileRows + static_cast<int>(threadIdx.x) % 32 / 4;
    if ((row & ((1 << list.fold) - 1)) != 0) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* const column = of[i % 2];
      const int block = (row + i / 2 * 8) >> list.fold;
      if (column == nullptr || block < list.first || block >= list.first + list.count) continue;
      column[block] = sums.best[i];
    }
  }
};

// The kernel for pieces of whole segments. Grid: (thread blocks of a list, KV heads, rows). Shared
// memory: queries, [head_dim / 16][32], and where rows have a spread as much for their squares.
template <int kSegments>
__global__ void __launch_bounds__(kThreads, kSegments > 4 ? kBlocksPerSm - 1 : kBlocksPerSm)
    LevelScoresKernel(const __grid_constant__ LevelScoresParams p) {
  extern __shared__ uint4 operands[];
  WaitForPriorKernels();
  LetNextKernelStart();
  const int kv_heads = static_cast<int>(gridDim.y), group = p.heads / kv_heads;
  const LevelList list(p, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), kv_heads);
  const int first_tile = list.row_begin / kTileRows;
  const int end_tile = (list.row_end + kTileRows - 1) / kTileRows;
  if (first_tile + static_cast<int>(blockIdx.x) * kWarps >= end_tile) return;
  const PagedRows& digests = p.digests.of[list.row_level];
  const int dim = p.head_dim, segments = digests.dim / kSegment;
  const bool has_spread = HasSpread(digests, dim);
  const int begin =
      first_tile + static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  for (int first = 0; first < group; first += kTileHeads) {
    const int heads = min(kTileHeads, group - first), head = list.kv_head * group + first;
    Segments<kSegments> rows;  // loads while the queries come
    if (begin < end_tile) rows.Load(TileRows(digests, list, begin), 0, segments);
    if (first > 0) __syncthreads();  // before other heads overwrite these
    PutQueries(p.q + list.row * p.q_stride + int64_t{head} * dim, heads, dim, has_spread, operands);
    const Columns columns(p, list, head, heads);
    __syncthreads();
    for (int tile = begin; tile < end_tile; tile += static_cast<int>(gridDim.x) * kWarps) {
      const TileRows at(digests, list, tile);
      TileSums sums;
      for (int s = 0; s < segments; s += kSegments) {
        if (tile != begin || s > 0) rows.Load(at, s, segments);
        sums.Add(rows, s, segments, dim / kSegment, operands);
      }
      sums.Fold(list.fold);
      columns.Put(sums, tile, list);
    }
  }
}

// Returns in every lane the dot product of a query, or of its squares, and a vector of a digest.
// `dim` is a multiple of 4.
template <bool kSquares>
__device__ __forceinline__ float DotVector(const float* query, const uint8_t* piece, int dim) {
  float sum = 0;
  for (int d = 4 * (static_cast<int>(threadIdx.x) % 32); d < dim; d += 128) {
    const uint2 pairs = WidenE4M3(*reinterpret_cast<const uint32_t*>(piece + d));
    const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&pairs.x));
    const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&pairs.y));
    float4 q = LoadFour(query + d);
    if (kSquares) q = {q.x * q.x, q.y * q.y, q.z * q.z, q.w * q.w};
    sum = fmaf(q.x, low.x, sum);
    sum = fmaf(q.y, low.y, sum);
    sum = fmaf(q.z, high.x, sum);
    sum = fmaf(q.w, high.y, sum);
  }
  return SumOfLanes(sum);
}

// The kernel for any pieces. The grid is the same. Shared memory: queries, [kTileHeads][head_dim].
__global__ void __launch_bounds__(kThreads)
    LevelScoresByBlocks(const __grid_constant__ LevelScoresParams p) {
  extern __shared__ uint4 memory[];
  auto* const queries = reinterpret_cast<float*>(memory);
  WaitForPriorKernels();
  LetNextKernelStart();
  const int kv_heads = static_cast<int>(gridDim.y), group = p.heads / kv_heads;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const LevelList list(p, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), kv_heads);
  if (static_cast<int>(blockIdx.x) * kWarps >= list.count) return;
  const PagedRows& digests = p.digests.of[list.row_level];
  const FluxionSegments segments = SegmentsOf(p.positions[list.row]);
  const int dim = p.head_dim;
  const bool has_spread = HasSpread(digests, dim);
  for (int first = 0; first < group; first += kTileHeads) {
    const int heads = min(kTileHeads, group - first), head = list.kv_head * group + first;
    const float* const q = p.q + list.row * p.q_stride + int64_t{head} * dim;
    if (first > 0) __syncthreads();  // before other heads overwrite these
    for (int i = static_cast<int>(threadIdx.x); i < heads * dim; i += kThreads) queries[i] = q[i];
    __syncthreads();
    const bool wanted = lane < heads && list.Wants(p, head + lane);
    for (int i = static_cast<int>(blockIdx.x) * kWarps + warp; i < list.count;
         i += static_cast<int>(gridDim.x) * kWarps) {
      const int block = list.first + i;
      const DigestRows rows = RowsOfBlock(p.digests, segments, list.level, block);
      float best = -INFINITY;  // of the lane's head
      for (int row = rows.begin; row < rows.end; ++row) {
        const uint8_t* const digest = RowAt<uint8_t>(digests, list.slot, row, list.kv_head);
        for (int h = 0; h < heads; ++h) {
          const float* const query = queries + h * dim;
          float score = -INFINITY;
          for (int piece = 0; piece < kDigestPieces; ++piece) {
            score = fmaxf(score, DotVector<false>(query, digest + piece * dim, dim));
          }
          if (has_spread) {
            score += Deviations(DotVector<true>(query, digest + kDigestPieces * dim, dim));
          }
          if (lane == h) best = fmaxf(best, score);
        }
      }
      if (!wanted) continue;
      p.scores[(int64_t{list.row} * p.heads + head + lane) * p.score_stride + block] = best;
    }
  }
}

bool AreValid(const LevelScoresParams& p) {
  for (const PagedRows& digests : p.digests.of) {
    if (digests.base == nullptr && &digests != &p.digests.of[0]) continue;
    if (!HasAlignedRows(digests)) return false;
  }
  return AreDigests(p.digests, p.head_dim) && p.head_dim % 16 == 0 && p.head_dim <= kMaxDim;
}

// Returns how many thread blocks a list has, from what the host knows.
int ListParts(const LevelScoresParams& p, int processors, int rows_at_once) {
  const int64_t lists = int64_t{p.rows} * p.digests.of[0].kv_heads;
  const int64_t to_fill = (int64_t{processors} * kBlocksPerSm + lists - 1) / lists;
  const int64_t longest = (p.score_stride + rows_at_once - 1) / rows_at_once;
  return static_cast<int>(std::clamp<int64_t>(longest, 1, std::max<int64_t>(kListParts, to_fill)));
}

}  // namespace

cudaError_t LaunchLevelScores(const LevelScoresParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  const PagedRows& digests = p.digests.of[0];
  if (!AreValid(p)) return cudaErrorInvalidValue;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  const int dim = p.head_dim;
  const bool has_tiles = dim % kSegment == 0;
  const bool has_spread = HasSpread(digests, dim);
  // Half of a row is under way with a head_dim of 128: 4 of its 8 segments, or 5 of 10.
  const auto kernel = !has_tiles   ? LevelScoresByBlocks
                      : has_spread ? LevelScoresKernel<5>
                                   : LevelScoresKernel<4>;
  // In tiles an element is two fp16, which are as many bytes as a float, and so is its square.
  const int operands = has_tiles && has_spread ? 2 : 1;
  const int64_t shared = int64_t{kTileHeads} * dim * int64_t{sizeof(float)} * operands;
  const int parts = ListParts(p, processors, kWarps * (has_tiles ? kTileRows : 1));
  return LaunchKernel(kernel, dim3(parts, digests.kv_heads, p.rows), dim3(kThreads),
                      static_cast<size_t>(shared), stream, p);
}

}  // namespace sluice::kernels::cuda
