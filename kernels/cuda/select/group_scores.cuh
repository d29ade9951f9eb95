// Scores of units for every shape of the contracts, in float32. A warp scores one unit at a time
// for all query heads of a group, and reduces the scores to one. This serves shapes that no large
// served model has, the oracle, and sums of softmax; digest_scores.cu has the fast form.
//
// A `Source` says what a unit's scores are:
//   Params                           the operator's params
//   RowDim(params), KvHeads(params)  floats of a query as Score() takes it; KV heads
//   Source(params, row, kv_head)
//   Units()                          number of units that have scores; -1 for a padded row
//   PutQuery(head, to)               puts a head of the group's query, scaled; called by the block
//   Score(queries, count, unit)      gives lane i < count the score of head i; called by a warp
//   UnitAt(i)                        the unit of the i-th of these scores
//   Finish(scores)                   adds the list's other scores; called by a block
//
// Bits: a head's score of a unit is a chain of its own, and the sums of a softmax are those of 32
// warps, each over every 32nd unit, added in order.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/paged_rows.cuh"

namespace sluice::kernels::cuda {

// Loads 16 bytes that this kernel reads once. The load is not .nc: an earlier kernel may write
// them while this one waits.
__device__ __forceinline__ uint4 LoadOnce(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

inline constexpr int kScoreWarps = 4;
inline constexpr int kScoreParts = 8;  // blocks that share a list; for a softmax, a cluster
inline constexpr int kMaxScoreRowDim = 512;
inline constexpr int kMaxScoreShared = 200 << 10;  // bytes

// The largest of the added values, and the sum of exp(x - largest), added in order.
struct RunningSum {
  float largest, sum;

  __device__ static RunningSum Empty() { return {-INFINITY, 0.0f}; }
  __device__ void Add(const RunningSum& other) {
    const float top = fmaxf(largest, other.largest);
    if (top == -INFINITY) return;
    sum = fmaf(sum, expf(largest - top), other.sum * expf(other.largest - top));
    largest = top;
  }
  __device__ void Add(float x) { Add(RunningSum{x, 1.0f}); }
  __device__ float LogSumExp() const { return largest + logf(sum); }
};

__device__ __forceinline__ float SumOfLanes(float x) {
  for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}
__device__ __forceinline__ float LargestOfLanes(float x) {
  for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
  return x;
}

// Reduces two scores of neighbouring heads, and those of the other lanes with the same row, to
// one.
__device__ __forceinline__ float ReduceHeads(float a, float b, int head, int group, bool largest) {
  if (largest) {
    float x = fmaxf(head < group ? a : -INFINITY, head + 1 < group ? b : -INFINITY);
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
  }
  float x = (head < group ? a : 0.0f) + (head + 1 < group ? b : 0.0f);
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ float4 LoadFour(const float* x) {
  return *reinterpret_cast<const float4*>(x);
}
__device__ __forceinline__ float4 LoadFour(const __nv_bfloat16* x) {
  const uint2 v = *reinterpret_cast<const uint2*>(x);
  return {__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
          __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u)};
}

// Returns in lane i < count the dot product of queries[i] and `row`, and in other lanes -inf. The
// rows have `dim` <= kMaxScoreRowDim elements, a multiple of 4, at aligned addresses. REQUIRES:
// count <= 32.
template <typename T>
__device__ float Dots(const float* queries, int count, const T* row, int dim) {
  constexpr int kFours = kMaxScoreRowDim / 128;  // fours of a lane
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float4 x[kFours];
#pragma unroll
  for (int j = 0; j < kFours; ++j) {
    const int d = 4 * lane + 128 * j;
    x[j] = d < dim ? LoadFour(row + d) : float4{0, 0, 0, 0};
  }
  float mine = -INFINITY;
  for (int i = 0; i < count; ++i) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      const int d = 4 * lane + 128 * j;
      if (d >= dim) break;
      const float4 q = LoadFour(queries + i * dim + d);
      sum = fmaf(q.x, x[j].x, sum);
      sum = fmaf(q.y, x[j].y, sum);
      sum = fmaf(q.z, x[j].z, sum);
      sum = fmaf(q.w, x[j].w, sum);
    }
    __syncwarp();
    sum = SumOfLanes(sum);
    if (lane == i) mine = sum;
  }
  return mine;
}

// Writes log(sum of exp) over all units of every head of the group to `lse`. All blocks of a
// cluster of kScoreParts call it. `sums` lies at the same address in each.
template <class Source>
__device__ void SoftmaxSums(const Source& source, const float* queries, int dim, int group,
                            float* lse, RunningSum (*sums)[32]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int first = 0; first < group; first += 32) {
    const int count = min(32, group - first);
    RunningSum mine = RunningSum::Empty();
    for (int unit = static_cast<int>(blockIdx.x) * kScoreWarps + warp; unit < source.Units();
         unit += kScoreParts * kScoreWarps) {
      mine.Add(source.Score(queries + first * dim, count, unit));
    }
    sums[warp][lane] = mine;
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    if (warp == 0 && lane < count) {
      RunningSum all = RunningSum::Empty();
      for (int block = 0; block < kScoreParts; ++block) {
        const auto* theirs =
            static_cast<const RunningSum*>(__cluster_map_shared_rank(&sums[0][0], block));
        for (int w = 0; w < kScoreWarps; ++w) all.Add(theirs[w * 32 + lane]);
      }
      lse[first + lane] = all.LogSumExp();
    }
    __cluster_barrier_arrive();  // all have read, before the next sums or the end of a block
    __cluster_barrier_wait();
  }
}

// Grid: (kScoreParts, KV heads, rows). Shared memory: queries [group][RowDim], lse [group].
template <class Source>
__global__ void __launch_bounds__(32 * kScoreWarps)
    GroupScores(const __grid_constant__ typename Source::Params p) {
  extern __shared__ __align__(16) float queries[];
  __shared__ RunningSum sums[kScoreWarps][32];
  WaitForPriorKernels();
  LetNextKernelStart();
  const int row = static_cast<int>(blockIdx.z), kv_head = static_cast<int>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int kv_heads = Source::KvHeads(p), group = p.heads / kv_heads, dim = Source::RowDim(p);
  const Source source(p, row, kv_head);
  if (source.Units() < 0) return;  // as all blocks of the list do
  float* const lse = queries + group * dim;
  for (int h = 0; h < group; ++h) source.PutQuery(h, queries + h * dim);
  __syncthreads();
  const bool softmax = p.reduction == GroupReduction::kSoftmaxSum;
  if (softmax) SoftmaxSums(source, queries, dim, group, lse, sums);

  float* const scores = p.scores + (int64_t{row} * kv_heads + kv_head) * p.score_stride;
  for (int unit = static_cast<int>(blockIdx.x) * kScoreWarps + warp; unit < source.Units();
       unit += kScoreParts * kScoreWarps) {
    float result = p.reduction == GroupReduction::kMax ? -INFINITY : 0.0f;
    for (int first = 0; first < group; first += 32) {
      const int count = min(32, group - first);
      float score = source.Score(queries + first * dim, count, unit);
      if (p.reduction == GroupReduction::kMax) {
        result = fmaxf(result, LargestOfLanes(score));
        continue;
      }
      if (softmax && lane < count) score = expf(score - lse[first + lane]);
      result += SumOfLanes(lane < count ? score : 0.0f);
    }
    if (p.reduction == GroupReduction::kMean) result /= static_cast<float>(group);
    if (lane == 0) scores[source.UnitAt(unit)] = result;
  }
  if (blockIdx.x == 0) source.Finish(scores);
}

// Launches the kernel. Returns cudaErrorInvalidValue if the group's queries do not fit in shared
// memory. REQUIRES: p.rows > 0.
template <class Source>
cudaError_t LaunchGroupScores(const typename Source::Params& p, cudaStream_t stream) {
  const int kv_heads = Source::KvHeads(p), group = p.heads / kv_heads;
  const int shared = group * (Source::RowDim(p) + 1) * static_cast<int>(sizeof(float));
  if (Source::RowDim(p) > kMaxScoreRowDim || shared > kMaxScoreShared) return cudaErrorInvalidValue;
  const cudaError_t error = cudaFuncSetAttribute(
      GroupScores<Source>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxScoreShared);
  if (error != cudaSuccess) return error;
  const dim3 grid(kScoreParts, kv_heads, p.rows), block(32 * kScoreWarps);
  const size_t bytes = static_cast<size_t>(shared);
  return p.reduction == GroupReduction::kSoftmaxSum
             ? LaunchClusters(GroupScores<Source>, grid, block, dim3(kScoreParts), bytes, stream, p)
             : LaunchKernel(GroupScores<Source>, grid, block, bytes, stream, p);
}

}  // namespace sluice::kernels::cuda
