// Scores of tokens by InfiniGen's partial keys.
//
// The kernel moves each partial key once for all query heads of its group: 2 * rank bytes, 399 MB
// for 10 rows of Qwen3-14B at 64K (8 KV heads, rank 38), floor 83 us at 4.8 TB/s. A float of
// scores for each, 21 MB, stays in L2. In float32 the multiplications alone are 1 G, and with the
// conversions they are as many instructions as the bytes take time; on tensor cores they are
// little.
//
// The A operand of a tensor-core tile is 16 partial keys. Rows of 76 bytes are no addresses for
// loads of 16, but a page's rows of a head lie one after the other: a warp copies 32 of them as
// one run of words through shared memory, while the next run is on its way. The B operand is the
// projected queries of 8 heads as sums of three bf16, all 24 bits: products of bf16 are exact.
//
// A block makes the projected queries once for a run of a list's tiles: each warp sums a quarter
// of the elements of the query, and the quarters are added in order. A score is a chain of its
// own over the rank, whichever block computes it.
#include <algorithm>

#include "kernels/cuda/common/attention_tile.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/tile_walk.cuh"
#include "kernels/cuda/select/group_scores.cuh"

namespace sluice::kernels::cuda {
namespace {

// The partial keys of one row and KV head, element by element, in any shape.
template <typename T>
struct PartialRows {
  using Params = PartialScoresParams;
  const Params& p;
  int row, kv_head, slot;

  static __host__ __device__ int RowDim(const Params& p) { return p.partial.dim; }
  static __host__ __device__ int KvHeads(const Params& p) { return p.partial.kv_heads; }
  __device__ PartialRows(const Params& params, int of_row, int head)
      : p(params), row(of_row), kv_head(head), slot(p.slots[row]) {}

  __device__ int Units() const { return slot < 0 ? -1 : p.positions[row]; }
  __device__ static int UnitAt(int i) { return i; }
  __device__ void PutQuery(int head, float* to) const {
    const int rank = p.partial.dim, group = p.heads / p.partial.kv_heads;
    const float* q = p.q + row * p.q_stride + (kv_head * group + head) * p.head_dim;
    const float* projection = p.projection + int64_t{kv_head} * p.head_dim * rank;
    for (int j = static_cast<int>(threadIdx.x); j < rank; j += 32 * kScoreWarps) {
      float sum = 0;
      for (int d = 0; d < p.head_dim; ++d) sum = fmaf(q[d], projection[d * rank + j], sum);
      to[j] = sum * p.scale;
    }
  }
  __device__ float Score(const float* queries, int count, int unit) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, rank = p.partial.dim;
    const T* partial = RowAt<T>(p.partial, slot, unit, kv_head);
    float mine = -INFINITY;
    for (int i = 0; i < count; ++i) {
      float sum = 0;
      for (int j = lane; j < rank; j += 32) {
        sum = fmaf(queries[i * rank + j], static_cast<float>(partial[j]), sum);
      }
      __syncwarp();
      sum = SumOfLanes(sum);
      if (lane == i) mine = sum;
    }
    return mine;
  }
  __device__ void Finish(float* scores) const { scores[Units()] = -INFINITY; }
};

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileRows = 32;  // rows that a warp takes at a time: two tiles of the tensor cores
constexpr int kTileHeads = 8;
constexpr int kMaxRank = 64;
constexpr int kMaxQueryDim = 256;
constexpr int kMaxSteps = kMaxRank / 16;
// 16-byte words of a tile that a lane holds
constexpr int kMaxWords = kTileRows * kMaxRank * 2 / 16 / 32;
constexpr int kBatch = 16;  // rows of the projection that a warp asks for at a time
constexpr int kBlocksPerSm = 5;
constexpr int kMaxShared = 64 << 10;

// Layout of shared memory: the operands of all heads, then memory that a run of rows and a
// projection use in turn.
struct Layout {
  int steps;       // steps of 16 elements of the rank
  int octets;      // groups of eight query heads
  int run_words;   // 16-byte words of 32 rows
  int page_tiles;  // tiles of a page

  __host__ __device__ int OperandBytes() const {
    return octets * steps * 3 * 32 * static_cast<int>(sizeof(uint2));
  }
  // Returns the bytes of a warp: its parts of 8 projected queries, or its rows.
  __host__ __device__ int WarpBytes() const {
    return max(run_words * 16, kTileHeads * kMaxRank * static_cast<int>(sizeof(float)));
  }
  int Bytes() const { return OperandBytes() + kWarps * WarpBytes(); }
};

// Makes the B operands of the group's projected queries: for 8 heads, 16 elements and each of
// three parts, largest first, two pairs a lane. `parts` is scratch of all warps.
__device__ void PutQueries(const PartialScoresParams& p, const Layout& layout, int row, int kv_head,
                           uint2* operands, float* parts) {
  const int rank = p.partial.dim, dim = p.head_dim, group = p.heads / p.partial.kv_heads;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const float* q = p.q + row * p.q_stride + int64_t{kv_head} * group * dim;
  const float* projection = p.projection + int64_t{kv_head} * dim * rank;
  const int part_floats = layout.WarpBytes() / 4;
  for (int octet = 0; octet < layout.octets; ++octet) {
    const int heads = min(kTileHeads, group - octet * kTileHeads);
    const float* of_octet = q + octet * kTileHeads * dim;
    for (int i = static_cast<int>(threadIdx.x); i < heads * dim; i += kThreads) {
      parts[i] = of_octet[i];
    }
    __syncthreads();
    float sums[kTileHeads][2] = {};
    const int end = dim * (warp + 1) / kWarps;
    for (int first = dim * warp / kWarps; first < end; first += kBatch) {
      float low[kBatch], high[kBatch];  // under way together
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float* const of_d = projection + (first + i) * rank;
        low[i] = first + i < end && lane < rank ? of_d[lane] : 0.0f;
        high[i] = first + i < end && lane + 32 < rank ? of_d[lane + 32] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i >= end) break;
#pragma unroll
        for (int h = 0; h < kTileHeads; ++h) {
          if (h >= heads) break;
          const float x = parts[h * dim + first + i];
          sums[h][0] = fmaf(x, low[i], sums[h][0]);
          sums[h][1] = fmaf(x, high[i], sums[h][1]);
        }
      }
    }
    __syncthreads();  // before the sums overwrite the queries
#pragma unroll
    for (int h = 0; h < kTileHeads; ++h) {
      parts[warp * part_floats + h * kMaxRank + lane] = sums[h][0];
      parts[warp * part_floats + h * kMaxRank + lane + 32] = sums[h][1];
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < layout.steps * 32; i += kThreads) {
      const int of_lane = i % 32, step = i / 32;
      uint32_t pairs[3][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = of_lane / 4 * kMaxRank + step * 16 + half * 8 + of_lane % 4 * 2 + e;
          float sum = parts[at];
          for (int w = 1; w < kWarps; ++w) sum += parts[w * part_floats + at];
          x[e] = sum * p.scale;
        }
        SplitBf16(x[0], x[1], pairs[0][half], pairs[1][half]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          for (int part = 0; part < 2; ++part) {
            const uint32_t pair = pairs[part][half];
            x[e] -= __uint_as_float(e == 0 ? pair << 16 : pair & 0xffff0000u);
          }
        }
        pairs[2][half] = PackBf16(x[0], x[1]);
      }
      uint2* const to = operands + (octet * layout.steps + step) * 3 * 32 + of_lane;
#pragma unroll
      for (int part = 0; part < 3; ++part) to[part * 32] = {pairs[part][0], pairs[part][1]};
    }
    __syncthreads();  // before the parts are overwritten
  }
}

// The location of the rows of a list's tile. A page has page_tiles tiles, the last one short.
struct Tile {
  int first, count;  // tokens
  const uint4* from;

  __device__ Tile(const PartialScoresParams& p, const Layout& layout, int slot, int kv_head,
                  int index, int units) {
    const PagedRows& r = p.partial;
    const int page = index / layout.page_tiles;
    const int in_page = (index - page * layout.page_tiles) * kTileRows;
    first = page * r.rows_per_page + in_page;
    count = min(min(kTileRows, r.rows_per_page - in_page), units - first);
    from = reinterpret_cast<const uint4*>(RowAt<__nv_bfloat16>(r, slot, first, kv_head));
  }
  // Returns the tile's 16-byte words. The last may reach into the memory behind the rows, in the
  // head's part of the page.
  __device__ int Words(int rank) const { return (count * rank * 2 + 15) / 16; }
};

struct Run {
  uint4 words[kMaxWords];  // loads under way

  __device__ void Load(const Tile& tile, int rank) {
    const int lane = static_cast<int>(threadIdx.x) % 32, count = tile.Words(rank);
#pragma unroll
    for (int i = 0; i < kMaxWords; ++i) {
      // The loads are streamed: rows are read once, and scores stay in L2.
      if (i * 32 + lane < count) words[i] = __ldcs(tile.from + i * 32 + lane);
    }
  }
  __device__ void Put(const Tile& tile, int rank, uint4* to) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, count = tile.Words(rank);
#pragma unroll
    for (int i = 0; i < kMaxWords; ++i) {
      if (i * 32 + lane < count) to[i * 32 + lane] = words[i];
    }
  }
};

// Scores 16 rows of a run, from row `first` of it on. `rows` are words of two elements.
__device__ __forceinline__ void ScoreRows(const PartialScoresParams& p, const Layout& layout,
                                          const uint32_t* rows, int first, const Tile& tile,
                                          const uint2* operands, float* scores) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int pairs = p.partial.dim / 2, group = p.heads / p.partial.kv_heads;
  const uint32_t* const upper = rows + (first + lane / 4) * pairs;
  const uint32_t* const lower = upper + 8 * pairs;
  uint32_t a[kMaxSteps][4];
#pragma unroll
  for (int s = 0; s < kMaxSteps; ++s) {
    const int low = s * 8 + lane % 4, high = low + 4;
    // Past the rank lies the next row, perhaps NaN.
    a[s][0] = low < pairs ? upper[low] : 0;
    a[s][1] = low < pairs ? lower[low] : 0;
    a[s][2] = high < pairs ? upper[high] : 0;
    a[s][3] = high < pairs ? lower[high] : 0;
  }
  const bool largest = p.reduction == GroupReduction::kMax;
  float upper_score = largest ? -INFINITY : 0.0f, lower_score = upper_score;
  for (int octet = 0; octet < layout.octets; ++octet) {
    float high[4] = {}, low[4] = {};
#pragma unroll
    for (int s = 0; s < kMaxSteps; ++s) {
      if (s >= layout.steps) break;
      const uint2* const b = operands + (octet * layout.steps + s) * 3 * 32 + lane;
      MultiplyAdd(high, a[s], b[0].x, b[0].y);
      MultiplyAdd(low, a[s], b[64].x, b[64].y);
      MultiplyAdd(low, a[s], b[32].x, b[32].y);
    }
    const int head = octet * kTileHeads + lane % 4 * 2;
    const float x = ReduceHeads(high[0] + low[0], high[1] + low[1], head, group, largest);
    const float y = ReduceHeads(high[2] + low[2], high[3] + low[3], head, group, largest);
    upper_score = largest ? fmaxf(upper_score, x) : upper_score + x;
    lower_score = largest ? fmaxf(lower_score, y) : lower_score + y;
  }
  if (!largest) {
    upper_score /= static_cast<float>(group);
    lower_score /= static_cast<float>(group);
  }
  if (lane % 4 != 0) return;
  const int row = first + lane / 4;
  if (row < tile.count) scores[tile.first + row] = upper_score;
  if (row + 8 < tile.count) scores[tile.first + row + 8] = lower_score;
}

// The kernel for bf16 partial keys of an even rank up to kMaxRank, whose pages begin on multiples
// of 16 bytes.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    PartialScoresKernel(const __grid_constant__ PartialScoresParams p, const Layout layout) {
  extern __shared__ __align__(16) unsigned char shared[];
  WaitForPriorKernels();
  LetNextKernelStart();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int rank = p.partial.dim, kv_heads = p.partial.kv_heads;
  uint2* const operands = reinterpret_cast<uint2*>(shared);
  unsigned char* const scratch = shared + layout.OperandBytes();
  uint4* const run_at = reinterpret_cast<uint4*>(scratch + warp * layout.WarpBytes());

  // Writes the score of the newest token of every list, which no tile has.
  for (int list = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
       list < p.rows * kv_heads; list += static_cast<int>(gridDim.x) * kThreads) {
    const int row = list / kv_heads;
    if (p.slots[row] < 0) continue;
    p.scores[list * p.score_stride + p.positions[row]] = -INFINITY;
  }
  const auto tiles_at = [&p, &layout](int units) {
    const int pages = units / p.partial.rows_per_page;
    const int rest = units - pages * p.partial.rows_per_page;
    return pages * layout.page_tiles + (rest + kTileRows - 1) / kTileRows;
  };
  TileWalk walk(p, kv_heads, tiles_at);
  walk.Start();
  if (walk.left == 0) return;
  while (true) {
    const int slot = walk.slot, units = walk.position, last = walk.Last();
    float* const scores = p.scores + (int64_t{walk.row} * kv_heads + walk.kv_head) * p.score_stride;
    const auto tile_at = [&](int index) {
      return Tile(p, layout, slot, walk.kv_head, index, units);
    };
    int index = walk.tile + warp;
    Run run;
    if (index < last) run.Load(tile_at(index), rank);
    PutQueries(p, layout, walk.row, walk.kv_head, operands, reinterpret_cast<float*>(scratch));
    for (; index < last; index += kWarps) {
      const Tile tile = tile_at(index);
      __syncwarp();  // the last run is free
      run.Put(tile, rank, run_at);
      __syncwarp();
      if (index + kWarps < last) run.Load(tile_at(index + kWarps), rank);
      for (int first = 0; first < tile.count; first += 16) {
        ScoreRows(p, layout, reinterpret_cast<const uint32_t*>(run_at), first, tile, operands,
                  scores);
      }
    }
    if (walk.left == last - walk.tile) return;
    walk.NextList();
    __syncthreads();  // before other queries overwrite these
  }
}

bool FitsTensorCores(const PartialScoresParams& p, const Layout& layout) {
  const PagedRows& r = p.partial;
  return r.type == DType::kBFloat16 && r.dim % 2 == 0 && r.dim <= kMaxRank &&
         p.reduction != GroupReduction::kSoftmaxSum && layout.Bytes() <= kMaxShared &&
         p.head_dim <= kMaxQueryDim && reinterpret_cast<uintptr_t>(r.base) % 16 == 0 &&
         r.page_bytes % 16 == 0 && r.head_bytes % 16 == 0;
}

}  // namespace

cudaError_t LaunchPartialScores(const PartialScoresParams& p, cudaStream_t stream) {
  const PagedRows& r = p.partial;
  if (p.rows < 0 || r.kv_heads < 1 || p.heads < r.kv_heads || p.heads % r.kv_heads != 0 ||
      r.dim < 1 || r.rows_per_page < 1 || p.head_dim < 1) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  Layout layout;
  layout.steps = (r.dim + 15) / 16;
  layout.octets = (p.heads / r.kv_heads + kTileHeads - 1) / kTileHeads;
  layout.run_words = (kTileRows * r.dim * 2 + 15) / 16;
  layout.page_tiles = (r.rows_per_page + kTileRows - 1) / kTileRows;
  if (!FitsTensorCores(p, layout)) {
    return r.type == DType::kFloat32 ? LaunchGroupScores<PartialRows<float>>(p, stream)
                                     : LaunchGroupScores<PartialRows<__nv_bfloat16>>(p, stream);
  }
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(PartialScoresKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kMaxShared);
  }
  // Asks for the split of an SM's memory that products have: changing it between kernels drains
  // the SM.
  if (error == cudaSuccess) {
    error =
        cudaFuncSetAttribute(PartialScoresKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared);
  }
  if (error != cudaSuccess) return error;
  return LaunchKernel(PartialScoresKernel, dim3(static_cast<unsigned>(kBlocksPerSm * processors)),
                      dim3(kThreads), static_cast<size_t>(layout.Bytes()), stream, p, layout);
}

}  // namespace sluice::kernels::cuda
