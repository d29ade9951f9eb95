// Quest's bounds of blocks: a digest row [least, largest] times the query's negative elements,
// then its positive ones, which is one dot product for each query head. For narrowed ranges a part
// of each element moves to the other end.
//
// The kernel moves each digest row once for all query heads of its group, 4 * head_dim bytes: 84
// MB for 10 rows of Qwen3-14B at 64K (8 KV heads, 2,048 blocks). The floor is 17.5 us at 4.8
// TB/s, and 20.4 us at the 4.1 TB/s at which an H200 reads as many bytes. In float32 that is 210
// M multiplications beside twice as many instructions to convert and to add up, more than the
// time of the bytes; on tensor cores it is little. Measured on an H200: 26.2 us, 78 % of reads,
// of which some 5 are the way to the first row (1 row: 7.0 us). Beside a product that reads 356
// MB it adds 25 us to it, top-k included, which is the time of its bytes at the product's own
// rate.
//
// The kernel runs beside products that fill the machine, and so is small: 128 threads of 128
// registers and 16 KB of shared memory fit beside three blocks of a product. Loads that are under
// way to registers bypass L1, so the split of an SM's memory is left to the driver.
//
// The A operand of a tensor-core tile is 16 digest rows, straight from memory. A lane loads 16
// bytes of two rows at a time, which are 2 of its elements in each of 4 positions of k. The
// position of an element does not matter as long as the queries, the B operand, have it in the
// same one. Columns are 8 query heads. A query is the sum of two bf16, 16 bits of it, as in
// attention_decode.cuh.
//
// Work is divided into tiles of 16 rows of one list. Blocks take equal runs of the tiles of all
// lists, and their warps every fourth tile. Each score is a chain of its own, whichever block
// computes it.
#include <algorithm>

#include "kernels/cuda/common/attention_tile.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/tile_walk.cuh"
#include "kernels/cuda/select/group_scores.cuh"

namespace sluice::kernels::cuda {
namespace {

// The digests of one row and KV head, element by element, in any shape.
template <typename T>
struct DigestRows {
  using Params = DigestScoresParams;
  const Params& p;
  int row, kv_head, slot;

  static __host__ __device__ int RowDim(const Params& p) { return p.digests.dim; }
  static __host__ __device__ int KvHeads(const Params& p) { return p.digests.kv_heads; }
  __device__ DigestRows(const Params& params, int of_row, int head)
      : p(params), row(of_row), kv_head(head), slot(p.slots[row]) {}

  __device__ int Units() const { return slot < 0 ? -1 : p.positions[row] / p.block_tokens; }
  __device__ static int UnitAt(int i) { return i; }
  __device__ void PutQuery(int head, float* to) const {
    const int dim = p.digests.dim / 2, group = p.heads / p.digests.kv_heads;
    const float* q = p.q + row * p.q_stride + (kv_head * group + head) * dim;
    const float other = p.narrowed / 2, own = 1 - other;
    for (int d = static_cast<int>(threadIdx.x); d < dim; d += 32 * kScoreWarps) {
      const float scaled = q[d] * p.scale;
      to[d] = scaled * (scaled < 0 ? own : other);
      to[dim + d] = scaled * (scaled < 0 ? other : own);
    }
  }
  __device__ float Score(const float* queries, int count, int unit) const {
    return Dots(queries, count, RowAt<T>(p.digests, slot, unit, kv_head), p.digests.dim);
  }
  __device__ void Finish(float* scores) const { scores[Units()] = -INFINITY; }
};

constexpr int kTileRows = 16;
constexpr int kTileHeads = 8;
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 4;
constexpr int kSegment = 32;  // elements of a row that four lanes load at a time: 64 bytes
constexpr int kMaxShared = 48 << 10;

// B operands of 8 heads of the group, 32 lanes for each 16 positions of k: upper parts, lower
// parts.
template <int segments>
__device__ void PutQueries(const float* q, int heads, int dim, float scale, float narrowed,
                           uint4* queries) {
  const float other = narrowed / 2, own = 1 - other;
  constexpr int kSteps = 2 * segments * 32 / kThreads;  // steps of a thread
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  float v[kSteps][4];  // all loads start before the first is used
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int step = i * kWarps + warp;
    const int element = step / 2 * kSegment + lane % 4 * 8 + step % 2 * 4;
    const float* from =
        q + min(lane / 4, heads - 1) * dim + (element < dim ? element : element - dim);
#pragma unroll
    for (int j = 0; j < 4; ++j) v[i][j] = from[j];
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int step = i * kWarps + warp;
    const bool is_least = step / 2 * kSegment + lane % 4 * 8 + step % 2 * 4 < dim;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float scaled = lane / 4 < heads ? v[i][j] * scale : 0.0f;
      v[i][j] = scaled * ((scaled < 0) == is_least ? own : other);
    }
    uint4 operand;
    SplitBf16(v[i][0], v[i][1], operand.x, operand.z);
    SplitBf16(v[i][2], v[i][3], operand.y, operand.w);
    queries[step * 32 + lane] = operand;
  }
}

// A lane's part of 16 digest rows: rows lane / 4 and lane / 4 + 8, 16 bytes of each segment.
template <int segments>
struct DigestTile {
  uint4 upper[segments], lower[segments];

  // Loads blocks [16 tile, 16 tile + 16). Blocks from `units` on repeat the last one before, and
  // count nowhere. REQUIRES: units > 0.
  __device__ __forceinline__ void Load(const PagedRows& digests, int slot, int kv_head, int units,
                                       int tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int block = tile * kTileRows + lane / 4;
    const auto* upper_row = reinterpret_cast<const uint4*>(
        RowAt<__nv_bfloat16>(digests, slot, min(block, units - 1), kv_head));
    const auto* lower_row = reinterpret_cast<const uint4*>(
        RowAt<__nv_bfloat16>(digests, slot, min(block + 8, units - 1), kv_head));
#pragma unroll
    for (int j = 0; j < segments; ++j) {
      upper[j] = LoadOnce(upper_row + j * 4 + lane % 4);
      lower[j] = LoadOnce(lower_row + j * 4 + lane % 4);
    }
  }

  // Computes scores[0, 1] for row lane / 4 and heads lane % 4 * 2 and the next, and scores[2, 3]
  // for the other row.
  __device__ __forceinline__ void Score(const uint4* queries, float (&scores)[4]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float even[4] = {}, odd[4] = {}, low_even[4] = {}, low_odd[4] = {};
#pragma unroll
    for (int j = 0; j < segments; ++j) {
      const uint4 b0 = queries[64 * j + lane], b1 = queries[64 * j + 32 + lane];
      const uint32_t a0[4] = {upper[j].x, lower[j].x, upper[j].y, lower[j].y};
      const uint32_t a1[4] = {upper[j].z, lower[j].z, upper[j].w, lower[j].w};
      MultiplyAdd(even, a0, b0.x, b0.y);
      MultiplyAdd(odd, a1, b1.x, b1.y);
      MultiplyAdd(low_even, a0, b0.z, b0.w);
      MultiplyAdd(low_odd, a1, b1.z, b1.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = (even[i] + odd[i]) + (low_even[i] + low_odd[i]);
  }
};

// Writes the scores of the blocks of a tile that was loaded, and -inf for the newest block.
template <int segments>
__device__ __forceinline__ void ScoreTile(const DigestScoresParams& p,
                                          const DigestTile<segments>& digests, int units, int tile,
                                          const uint4* queries, float* scores) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = p.heads / p.digests.kv_heads;
  const bool largest = p.reduction == GroupReduction::kMax;
  float upper_score = largest ? -INFINITY : 0.0f, lower_score = upper_score;
  for (int first = 0; first < group; first += kTileHeads) {
    float of_heads[4];
    digests.Score(queries + first / kTileHeads * 64 * segments, of_heads);
    const int head = first + lane % 4 * 2;
    const float a = ReduceHeads(of_heads[0], of_heads[1], head, group, largest);
    const float b = ReduceHeads(of_heads[2], of_heads[3], head, group, largest);
    upper_score = largest ? fmaxf(upper_score, a) : upper_score + a;
    lower_score = largest ? fmaxf(lower_score, b) : lower_score + b;
  }
  if (!largest) {
    upper_score /= static_cast<float>(group);
    lower_score /= static_cast<float>(group);
  }
  if (lane % 4 != 0) return;
  const int upper = tile * kTileRows + lane / 4, lower = upper + 8;
  if (upper <= units) scores[upper] = upper < units ? upper_score : -INFINITY;
  if (lower <= units) scores[lower] = lower < units ? lower_score : -INFINITY;
}

// A list, and the first of its tiles that belong to this block.
struct ListPart {
  int slot, kv_head, units, tile;
  const float* q;
  float* scores;
};

template <typename Walk>
__device__ ListPart PartAt(const DigestScoresParams& p, const Walk& walk) {
  const int64_t group = p.heads / p.digests.kv_heads, dim = p.digests.dim / 2;
  return {walk.slot,
          walk.kv_head,
          walk.position / p.block_tokens,
          walk.tile,
          p.q + walk.row * p.q_stride + walk.kv_head * group * dim,
          p.scores + (int64_t{walk.row} * p.digests.kv_heads + walk.kv_head) * p.score_stride};
}

// The kernel for bf16 digests of head_dim 16 * segments. It takes two lists at a time, which for
// most blocks are all that they have. Shared memory: queries, [2][ceil(group / 8)][2 *
// segments][32].
template <int segments>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    DigestScoresKernel(const __grid_constant__ DigestScoresParams p) {
  extern __shared__ uint4 operands[];
  __shared__ ListPart parts[2];
  WaitForPriorKernels();
  LetNextKernelStart();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int group = p.heads / p.digests.kv_heads, dim = p.digests.dim / 2;
  const int list_operands = (group + kTileHeads - 1) / kTileHeads * 64 * segments;
  // A list has a tile for every 16 blocks that it scores, including the newest.
  const auto tiles_at = [&p](int position) { return position / p.block_tokens / kTileRows + 1; };
  TileWalk walk(p, p.digests.kv_heads, tiles_at);
  walk.Start();
  if (walk.left == 0) return;
  while (true) {
    const int of_first = walk.Last() - walk.tile;
    int count = of_first;
    if (threadIdx.x == 0) parts[0] = PartAt(p, walk);
    if (walk.left > of_first) {
      walk.NextList();
      count += walk.Last() - walk.tile;
      if (threadIdx.x == 0) parts[1] = PartAt(p, walk);
    }
    __syncthreads();
    const auto load = [&](DigestTile<segments>& digests, int i) {
      const ListPart& part = parts[i < of_first ? 0 : 1];
      if (part.units > 0) {
        digests.Load(p.digests, part.slot, part.kv_head, part.units,
                     part.tile + i - (i < of_first ? 0 : of_first));
      }
    };
    DigestTile<segments> digests;  // loads while the queries come
    int i = warp;
    if (i < count) load(digests, i);
    for (int list = 0; list < (count > of_first ? 2 : 1); ++list) {
      for (int first = 0; first < group; first += kTileHeads) {
        PutQueries<segments>(parts[list].q + first * dim, group - first, dim, p.scale, p.narrowed,
                             operands + list * list_operands + first / kTileHeads * 64 * segments);
      }
    }
    __syncthreads();
    while (i < count) {
      const ListPart& part = parts[i < of_first ? 0 : 1];
      ScoreTile(p, digests, part.units, part.tile + i - (i < of_first ? 0 : of_first),
                operands + (i < of_first ? 0 : list_operands), part.scores);
      i += kWarps;
      if (i < count) load(digests, i);
    }
    if (walk.left == walk.Last() - walk.tile) return;
    walk.NextList();
    __syncthreads();  // before other lists overwrite these
  }
}

int SharedBytes(const DigestScoresParams& p) {
  const int group = p.heads / p.digests.kv_heads;
  return 2 * ((group + kTileHeads - 1) / kTileHeads) * (p.digests.dim / kSegment) * 64 *
         static_cast<int>(sizeof(uint4));
}

bool FitsTensorCores(const DigestScoresParams& p) {
  return p.digests.type == DType::kBFloat16 && p.reduction != GroupReduction::kSoftmaxSum &&
         (p.digests.dim == 128 || p.digests.dim == 256) && SharedBytes(p) <= kMaxShared;
}

}  // namespace

cudaError_t LaunchDigestScores(const DigestScoresParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.digests.dim % kSegment != 0 || !HasAlignedRows(p.digests)) return cudaErrorInvalidValue;
  if (!FitsTensorCores(p)) {
    return p.digests.type == DType::kFloat32
               ? LaunchGroupScores<DigestRows<float>>(p, stream)
               : LaunchGroupScores<DigestRows<__nv_bfloat16>>(p, stream);
  }
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  const auto kernel = p.digests.dim == 256 ? DigestScoresKernel<8> : DigestScoresKernel<4>;
  return LaunchKernel(kernel, dim3(kBlocksPerSm * processors), dim3(kThreads),
                      static_cast<size_t>(SharedBytes(p)), stream, p);
}

}  // namespace sluice::kernels::cuda
