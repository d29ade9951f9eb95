// Scores of blocks for single query heads: a digest row [mean, variance] times the query's
// elements, then their squares, which are two dot products for each query head.
//
// The kernel moves each digest row once for all query heads of a group of up to 8, 4 * head_dim
// bytes in bf16: 168 MB for 10 rows of Qwen3-14B at 64K and blocks of 16 tokens (8 KV heads, 4,096
// blocks), whose floor is 35 us at 4.8 TB/s. Digests may also lie in pinned host memory: every load
// has 16 bytes, and four lanes take 64 neighbouring ones.
//
// As in select/digest_scores.cu, the A operand of a tensor-core tile is 16 digest rows, straight
// from memory. A lane loads 16 bytes of two rows at a time, which are 2 of its elements in each of
// 4 positions of k. The position of an element does not matter as long as the queries, the B
// operand, have it in the same one. Columns are 8 query heads. A factor, which is an element of a
// query or its square, is the sum of two bf16, 16 bits of it. Means come first, and their sums are
// finished before those of the variances begin, which saves registers. Warps take one row at a time
// where head_dim is not a multiple of a segment, and where digests are float32, which only tests
// have on a GPU.
//
// Only the device knows how many blocks a list has. The grid has so many thread blocks for each
// list that few lists fill the machine too; they take tiles in turn, and those behind the list's
// end are over at once. Each score is a chain of its own, whichever thread block computes it.
#include <algorithm>

#include "kernels/cuda/common/attention_tile.cuh"
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
constexpr int kSegment = 32;    // elements of a row that four lanes load at a time: 64 bytes
constexpr int kSegments = 4;    // segments of a row that are under way together
constexpr int kListParts = 16;  // the most thread blocks of a list, where lists fill the machine

// Returns the factor of element `element` of a digest row for a query.
__device__ __forceinline__ float Factor(const float* q, int element, int dim) {
  return element < dim ? q[element] : q[element - dim] * q[element - dim];
}

// Returns a score from its two dot products.
__device__ __forceinline__ float ScoreOf(float mean, float variance) {
  return mean + kFluxionDeviations * sqrtf(fmaxf(variance, 0.0f));
}

// Puts the B operands of up to 8 heads: 32 lanes for each 16 positions of k, upper and lower parts.
// The whole thread block calls it.
__device__ void PutQueries(const float* q, int heads, int dim, uint4* queries) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const float* const of_head = q + min(lane / 4, heads - 1) * dim;
  for (int step = warp; step < 2 * dim / 16; step += kWarps) {
    const int element = step / 2 * kSegment + lane % 4 * 8 + step % 2 * 4;
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = lane / 4 < heads ? Factor(of_head, element + j, dim) : 0.0f;
    uint4 operand;
    SplitBf16(v[0], v[1], operand.x, operand.z);
    SplitBf16(v[2], v[3], operand.y, operand.w);
    queries[step * 32 + lane] = operand;
  }
}

// A lane's place in 16 digest rows: rows lane / 4 and lane / 4 + 8.
struct TileRows {
  const uint4* upper;
  const uint4* lower;

  // The tile's rows from the list's end on repeat the last row, and count nowhere.
  __device__ TileRows(const PagedRows& digests, const LevelList& list, int tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = tile * kTileRows + lane / 4;
    upper = Of(digests, list, row) + lane % 4;
    lower = Of(digests, list, row + 8) + lane % 4;
  }

 private:
  __device__ static const uint4* Of(const PagedRows& digests, const LevelList& list, int row) {
    return reinterpret_cast<const uint4*>(RowAt<__nv_bfloat16>(
        digests, list.slot, list.first + min(row, list.count - 1), list.kv_head));
  }
};

// Loaded segments of a lane's two rows.
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

// Sums of a tile, of means until variances begin: [0, 1] are of row lane / 4 and heads lane % 4 * 2
// and the next, [2, 3] of the other row.
struct TileSums {
  float even[4] = {}, odd[4] = {}, low_even[4] = {}, low_odd[4] = {};
  float means[4] = {};

  __device__ __forceinline__ void Add(const Segments& rows, int first, int segments,
                                      const uint4* queries) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < kSegments; ++j) {
      if (first + j >= segments) continue;
      if (first + j == segments / 2) BeginVariances();
      const uint4* const operands = queries + 64 * (first + j) + lane;
      const uint4 b0 = operands[0], b1 = operands[32];
      const uint32_t a0[4] = {rows.upper[j].x, rows.lower[j].x, rows.upper[j].y, rows.lower[j].y};
      const uint32_t a1[4] = {rows.upper[j].z, rows.lower[j].z, rows.upper[j].w, rows.lower[j].w};
      MultiplyAdd(even, a0, b0.x, b0.y);
      MultiplyAdd(odd, a1, b1.x, b1.y);
      MultiplyAdd(low_even, a0, b0.z, b0.w);
      MultiplyAdd(low_odd, a1, b1.z, b1.w);
    }
  }
  __device__ __forceinline__ float Score(int i) const { return ScoreOf(means[i], Sum(i)); }

 private:
  __device__ __forceinline__ float Sum(int i) const {
    return (even[i] + odd[i]) + (low_even[i] + low_odd[i]);
  }
  __device__ __forceinline__ void BeginVariances() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      means[i] = Sum(i);
      even[i] = odd[i] = low_even[i] = low_odd[i] = 0;
    }
  }
};

// A lane's two columns of scores: those of the heads lane % 4 * 2 and the next, from the list's
// first block on; null where a head has none.
struct Columns {
  float* of[2];

  __device__ Columns(const LevelScoresParams& p, const LevelList& list, int first_head, int heads) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int in_tile = static_cast<int>(threadIdx.x) % 4 * 2 + i, head = first_head + in_tile;
      const bool wanted = in_tile < heads && list.Wants(p, head);
      of[i] = wanted ? p.scores + (int64_t{list.row} * p.heads + head) * p.score_stride + list.first
                     : nullptr;
    }
  }
  __device__ __forceinline__ void Put(const TileSums& sums, int tile, int count) const {
    const int row = tile * kTileRows + static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (of[i] == nullptr) continue;
      if (row < count) of[i][row] = sums.Score(i);
      if (row + 8 < count) of[i][row + 8] = sums.Score(2 + i);
    }
  }
};

// The kernel for bf16 digests whose halves are whole segments. Grid: (thread blocks of a list, KV
// heads, rows). Shared memory: queries, [head_dim / 8][32].
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    LevelScoresKernel(const __grid_constant__ LevelScoresParams p) {
  extern __shared__ uint4 operands[];
  WaitForPriorKernels();
  LetNextKernelStart();
  const int kv_heads = static_cast<int>(gridDim.y), group = p.heads / kv_heads;
  const LevelList list(p, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), kv_heads);
  const int tiles = (list.count + kTileRows - 1) / kTileRows;
  if (static_cast<int>(blockIdx.x) * kWarps >= tiles) return;
  const PagedRows& digests = p.digests.of[list.level];
  const int dim = digests.dim / 2, segments = digests.dim / kSegment;
  const int begin = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  for (int first = 0; first < group; first += kTileHeads) {
    const int heads = min(kTileHeads, group - first), head = list.kv_head * group + first;
    Segments rows;  // loads while the queries come
    if (begin < tiles) rows.Load(TileRows(digests, list, begin), 0, segments);
    if (first > 0) __syncthreads();  // before other heads overwrite these
    PutQueries(p.q + list.row * p.q_stride + int64_t{head} * dim, heads, dim, operands);
    const Columns columns(p, list, head, heads);
    __syncthreads();
    for (int tile = begin; tile < tiles; tile += static_cast<int>(gridDim.x) * kWarps) {
      const TileRows at(digests, list, tile);
      TileSums sums;
      for (int s = 0; s < segments; s += kSegments) {
        if (tile != begin || s > 0) rows.Load(at, s, segments);
        sums.Add(rows, s, segments, operands);
      }
      columns.Put(sums, tile, list.count);
    }
  }
}

// The kernel for any digests. The grid is the same. Shared memory: queries, [kTileHeads][head_dim],
// then their squares.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    LevelScoresByRows(const __grid_constant__ LevelScoresParams p) {
  extern __shared__ uint4 memory[];
  auto* const factors = reinterpret_cast<float*>(memory);
  WaitForPriorKernels();
  LetNextKernelStart();
  const int kv_heads = static_cast<int>(gridDim.y), group = p.heads / kv_heads;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const LevelList list(p, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), kv_heads);
  if (static_cast<int>(blockIdx.x) * kWarps >= list.count) return;
  const PagedRows& digests = p.digests.of[list.level];
  const int dim = digests.dim / 2;
  for (int first = 0; first < group; first += kTileHeads) {
    const int heads = min(kTileHeads, group - first), head = list.kv_head * group + first;
    const float* const q = p.q + list.row * p.q_stride + int64_t{head} * dim;
    float* const squares = factors + heads * dim;
    if (first > 0) __syncthreads();  // before other heads overwrite these
    for (int i = static_cast<int>(threadIdx.x); i < heads * dim; i += kThreads) {
      factors[i] = q[i];
      squares[i] = q[i] * q[i];
    }
    __syncthreads();
    const bool wanted = lane < heads && list.Wants(p, head + lane);
    for (int i = static_cast<int>(blockIdx.x) * kWarps + warp; i < list.count;
         i += static_cast<int>(gridDim.x) * kWarps) {
      const T* const row = RowAt<const T>(digests, list.slot, list.first + i, list.kv_head);
      const float mean = Dots(factors, heads, row, dim);
      const float variance = Dots(squares, heads, row + dim, dim);
      if (!wanted) continue;
      p.scores[(int64_t{list.row} * p.heads + head + lane) * p.score_stride + list.first + i] =
          ScoreOf(mean, variance);
    }
  }
}

bool AreValid(const LevelScoresParams& p) {
  const PagedRows& first = p.digests.of[0];
  for (const PagedRows& digests : p.digests.of) {
    if (digests.type != first.type || digests.dim != first.dim ||
        digests.kv_heads != first.kv_heads || digests.dim % kSegment != 0 ||
        !HasAlignedRows(digests)) {
      return false;
    }
  }
  return first.dim <= kMaxScoreRowDim;
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
  const bool is_bf16 = digests.type == DType::kBFloat16;
  const bool has_tiles = is_bf16 && digests.dim / 2 % kSegment == 0;
  const auto kernel = has_tiles ? LevelScoresKernel
                      : is_bf16 ? LevelScoresByRows<__nv_bfloat16>
                                : LevelScoresByRows<float>;
  // At most 16 KiB each: in tiles a factor is two bf16, and so has as many bytes as a float.
  const int64_t shared = int64_t{kTileHeads} * digests.dim * int64_t{sizeof(float)};
  const int parts = ListParts(p, processors, kWarps * (has_tiles ? kTileRows : 1));
  return LaunchKernel(kernel, dim3(parts, digests.kv_heads, p.rows), dim3(kThreads),
                      static_cast<size_t>(shared), stream, p);
}

}  // namespace sluice::kernels::cuda
