// Quest's bounds of blocks: a digest row [least, largest] times the query's negative elements, then
// its positive ones: one dot product for each query head.
//
// Moves each digest row once for all query heads of its group, 4 * head_dim bytes: 84 MB for 10
// rows of Qwen3-14B at 64K (8 KV heads, 2,048 blocks), floor 17.5 us at 4.8 TB/s. In float32 that
// is 210 M multiplications beside twice as many instructions to convert and to add up, more than
// the time of the bytes; on tensor cores it is little. The kernel runs beside products that fill
// the machine, and so is small: 128 threads and 8 KB of shared memory fit beside three blocks of
// them.
//
// The A operand of a tensor-core tile is 16 digest rows, straight from memory: a lane loads 16
// bytes of two rows at a time, which are 2 of its elements in each of 4 places of k, and what place
// an element has does not matter as long as the queries, the B operand, have it in the same.
// Columns are 8 query heads; a query is the sum of two bf16, 16 bits of it, as in
// attention_decode.cuh.
//
// Work is tiles of 16 rows of one list. Blocks take equal runs of the tiles of all lists, and their
// warps every fourth tile: each score is a chain of its own, whoever computes it.
#include <algorithm>

#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/group_scores.cuh"
#include "kernels/cuda/launch.h"

namespace sluice::kernels::cuda {
namespace {

// One row and KV head's digests, element by element: any shape.
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
  __device__ void PutQuery(int head, float* to) const {
    const int dim = p.digests.dim / 2, group = p.heads / p.digests.kv_heads;
    const float* q = p.q + row * p.q_stride + (kv_head * group + head) * dim;
    for (int d = static_cast<int>(threadIdx.x); d < dim; d += 32 * kScoreWarps) {
      const float scaled = q[d] * p.scale;
      to[d] = scaled < 0 ? scaled : 0.0f;
      to[dim + d] = scaled < 0 ? 0.0f : scaled;
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
constexpr int kBlocksPerSm = 3;
constexpr int kSegment = 32;     // elements of a row that four lanes load at a time: 64 bytes
constexpr int kMaxSegments = 8;  // of a row: head_dim 128
constexpr int kMaxShared = 48 << 10;

// B operands of the group's queries, for 8 heads and 16 places of k in each: upper parts, lower.
__device__ void PutQueries(const DigestScoresParams& p, int row, int kv_head, int segments,
                           uint4* queries) {
  const int dim = p.digests.dim / 2, group = p.heads / p.digests.kv_heads;
  const float* q = p.q + row * p.q_stride + int64_t{kv_head} * group * dim;
  const int count = (group + kTileHeads - 1) / kTileHeads * segments * 64;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += 32 * kWarps) {
    const int lane = i % 32, step = i / 32 % (2 * segments);
    const int head = i / (64 * segments) * kTileHeads + lane / 4;
    const int element = step / 2 * kSegment + lane % 4 * 8 + step % 2 * 4;
    const bool is_least = element < dim;
    const float* from = q + head * dim + (is_least ? element : element - dim);
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float scaled = head < group ? from[j] * p.scale : 0.0f;
      v[j] = (scaled < 0) == is_least ? scaled : 0.0f;
    }
    uint4 operand;
    SplitBf16(v[0], v[1], operand.x, operand.z);
    SplitBf16(v[2], v[3], operand.y, operand.w);
    queries[i] = operand;
  }
}

// 16 bytes that this kernel reads once. Not .nc: an earlier kernel may write them while this waits.
__device__ __forceinline__ uint4 LoadOnce(const unsigned char* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// A lane's part of 16 digest rows: rows lane / 4 and lane / 4 + 8, 16 bytes of each segment.
struct DigestTile {
  uint4 upper[kMaxSegments], lower[kMaxSegments];

  __device__ void Load(const unsigned char* upper_row, const unsigned char* lower_row,
                       int segments) {
#pragma unroll
    for (int j = 0; j < kMaxSegments; ++j) {
      if (j < segments) {
        upper[j] = LoadOnce(upper_row + j * 64);
        lower[j] = LoadOnce(lower_row + j * 64);
      }
    }
  }

  // scores[0, 1]: of row lane / 4 and heads lane % 4 * 2 and the next; [2, 3]: of the other row.
  __device__ void Score(const uint4* queries, int segments, float (&scores)[4]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float even[4] = {}, odd[4] = {}, low[4] = {};
#pragma unroll
    for (int j = 0; j < kMaxSegments; ++j) {
      if (j < segments) {
        const uint4 b0 = queries[64 * j + lane], b1 = queries[64 * j + 32 + lane];
        const uint32_t a0[4] = {upper[j].x, lower[j].x, upper[j].y, lower[j].y};
        const uint32_t a1[4] = {upper[j].z, lower[j].z, upper[j].w, lower[j].w};
        MultiplyAdd(even, a0, b0.x, b0.y);
        MultiplyAdd(odd, a1, b1.x, b1.y);
        MultiplyAdd(low, a0, b0.z, b0.w);
        MultiplyAdd(low, a1, b1.z, b1.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = (even[i] + odd[i]) + low[i];
  }
};

// Two scores of neighbouring heads, and those of the other lanes with the same row, as one.
__device__ __forceinline__ float Reduce(float a, float b, int head, int group, bool largest) {
  if (largest) {
    float x = fmaxf(head < group ? a : -INFINITY, head + 1 < group ? b : -INFINITY);
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
  }
  float x = (head < group ? a : 0.0f) + (head + 1 < group ? b : 0.0f);
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The tiles of all lists in order: rows, then heads. A list has one for every 16 blocks that it
// scores, the newest included.
struct TileWalk {
  const DigestScoresParams& p;
  int row = 0, kv_head = 0, tile = 0;  // where it is
  int tiles = 0;                       // of the list

  __device__ int TilesOfList(int r) const {
    return r < p.rows && p.slots[r] >= 0 ? p.positions[r] / p.block_tokens / kTileRows + 1 : 0;
  }

  // Called by whole warps. The number of all tiles.
  __device__ int64_t Count() const {
    int64_t sum = 0;
    for (int r = static_cast<int>(threadIdx.x) % 32; r < p.rows; r += 32) sum += TilesOfList(r);
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    return sum * p.digests.kv_heads;
  }
  // Goes to tile `index` < Count().
  __device__ void Seek(int64_t index) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int64_t before = 0;
    for (int first = 0;; first += 32) {
      const int64_t mine = int64_t{TilesOfList(first + lane)} * p.digests.kv_heads;
      int64_t through = mine;
      for (int step = 1; step < 32; step *= 2) {
        const int64_t other = __shfl_up_sync(0xffffffffu, through, step);
        if (lane >= step) through += other;
      }
      const unsigned beyond = __ballot_sync(0xffffffffu, before + through > index);
      if (beyond == 0) {
        before += __shfl_sync(0xffffffffu, through, 31);
        continue;
      }
      const int found = __ffs(static_cast<int>(beyond)) - 1;
      row = first + found;
      before += __shfl_sync(0xffffffffu, through - mine, found);
      break;
    }
    tiles = TilesOfList(row);
    kv_head = static_cast<int>((index - before) / tiles);
    tile = static_cast<int>((index - before) % tiles);
  }
  __device__ void NextList() {
    tile = 0;
    if (++kv_head < p.digests.kv_heads) return;
    kv_head = 0;
    do tiles = TilesOfList(++row);
    while (tiles == 0 && row < p.rows);
  }
};

// Scores of blocks [16 tile, 16 tile + 16) of a list.
__device__ __forceinline__ void ScoreTile(const DigestScoresParams& p, int slot, int kv_head,
                                          int units, int tile, int segments, const uint4* queries,
                                          float* scores) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int group = p.heads / p.digests.kv_heads;
  const int upper = tile * kTileRows + lane / 4, lower = upper + 8;
  float upper_score = -INFINITY, lower_score = -INFINITY;
  if (tile * kTileRows < units) {  // else there is the newest alone
    const auto row_at = [&](int unit) {
      return reinterpret_cast<const unsigned char*>(
                 RowAt<__nv_bfloat16>(p.digests, slot, min(unit, units - 1), kv_head)) +
             lane % 4 * 16;
    };
    DigestTile digests;
    digests.Load(row_at(upper), row_at(lower), segments);
    const bool largest = p.reduction == GroupReduction::kMax;
    if (!largest) upper_score = lower_score = 0.0f;
    for (int first = 0; first < group; first += kTileHeads) {
      float of_heads[4];
      digests.Score(queries + first / kTileHeads * 64 * segments, segments, of_heads);
      const int head = first + lane % 4 * 2;
      const float a = Reduce(of_heads[0], of_heads[1], head, group, largest);
      const float b = Reduce(of_heads[2], of_heads[3], head, group, largest);
      upper_score = largest ? fmaxf(upper_score, a) : upper_score + a;
      lower_score = largest ? fmaxf(lower_score, b) : lower_score + b;
    }
    if (!largest) {
      upper_score /= static_cast<float>(group);
      lower_score /= static_cast<float>(group);
    }
  }
  if (lane % 4 != 0) return;
  if (upper <= units) scores[upper] = upper < units ? upper_score : -INFINITY;
  if (lower <= units) scores[lower] = lower < units ? lower_score : -INFINITY;
}

// bf16 digests of head_dim up to 128; a group's queries in shared memory.
__global__ void __launch_bounds__(32 * kWarps)
    DigestScoresKernel(const __grid_constant__ DigestScoresParams p) {
  extern __shared__ uint4 operands[];
  WaitForPriorKernels();
  LetNextKernelStart();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int segments = p.digests.dim / kSegment;
  TileWalk walk{p};
  const int64_t count = walk.Count();
  int64_t at = count * blockIdx.x / gridDim.x;
  const int64_t end = count * (blockIdx.x + 1) / gridDim.x;
  if (at == end) return;
  walk.Seek(at);
  while (true) {
    PutQueries(p, walk.row, walk.kv_head, segments, operands);
    __syncthreads();
    const int slot = p.slots[walk.row], units = p.positions[walk.row] / p.block_tokens;
    const int last = static_cast<int>(min(int64_t{walk.tiles}, walk.tile + (end - at)));
    float* const scores =
        p.scores + (int64_t{walk.row} * p.digests.kv_heads + walk.kv_head) * p.score_stride;
    for (int tile = walk.tile + warp; tile < last; tile += kWarps) {
      ScoreTile(p, slot, walk.kv_head, units, tile, segments, operands, scores);
    }
    at += last - walk.tile;
    if (at == end) return;
    walk.NextList();
    __syncthreads();  // before other queries take these ones' place
  }
}

int SharedBytes(const DigestScoresParams& p) {
  const int group = p.heads / p.digests.kv_heads;
  return (group + kTileHeads - 1) / kTileHeads * (p.digests.dim / kSegment) * 64 *
         static_cast<int>(sizeof(uint4));
}

bool FitsTensorCores(const DigestScoresParams& p) {
  return p.digests.type == DType::kBFloat16 && p.reduction != GroupReduction::kSoftmaxSum &&
         p.digests.dim <= kMaxSegments * kSegment && SharedBytes(p) <= kMaxShared;
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
  // The split of an SM's memory that products have: changing it between kernels drains the SM.
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(DigestScoresKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  if (error != cudaSuccess) return error;
  return LaunchKernel(DigestScoresKernel, dim3(kBlocksPerSm * processors), dim3(32 * kWarps),
                      static_cast<size_t>(SharedBytes(p)), stream, p);
}

}  // namespace sluice::kernels::cuda
