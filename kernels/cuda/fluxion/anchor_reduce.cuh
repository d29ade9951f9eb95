// Reductions over a warp or a block in one fixed order, and addresses, for the statistics of
// anchors.
#pragma once

#include <cuda_runtime.h>

#include "kernels/anchor_scratch.h"
#include "kernels/cuda/common/paged_rows.cuh"

namespace sluice::kernels::cuda {

inline constexpr int kAnchorMaxWarps = 16;

// An array of the scratch.
template <typename T>
__device__ __forceinline__ T* AnchorArray(const AnchorStatisticsParams& p, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(p.scratch) + offset);
}

__device__ __forceinline__ AnchorLayout RowLayout(const AnchorStatisticsParams& p, int row) {
  return AnchorLayoutOf(int64_t{p.positions[row]} + 1, p.heads, p.cache.kv_heads, p.cache.head_dim);
}

// Where the numbers of a query head lie in FluxionAnchors::heads.
__device__ __forceinline__ float* HeadNumbers(const AnchorStatisticsParams& p, int slot, int head) {
  return p.anchors.heads +
         (int64_t{slot} * p.heads + head) * (kAnchorHeadNumbers + p.cache.head_dim);
}
__device__ __forceinline__ float* KvNumbers(const AnchorStatisticsParams& p, int slot, int head) {
  return p.anchors.kv +
         (int64_t{slot} * p.cache.kv_heads + head) * (kAnchorKvNumbers + p.cache.head_dim);
}

__device__ __forceinline__ double AnchorWarpSum(double v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  return v;
}

// Return the sum, or the largest, over a block of whole warps, the same in every thread. All
// threads must call them together; they may be called again at once.
__device__ __forceinline__ double AnchorBlockSum(double v) {
  __shared__ double of_warps[kAnchorMaxWarps];
  v = AnchorWarpSum(v);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = v;
  __syncthreads();
  double sum = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += of_warps[w];
  __syncthreads();
  return sum;
}
__device__ __forceinline__ float AnchorBlockLargest(float v) {
  __shared__ float of_warps[kAnchorMaxWarps];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, step));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = v;
  __syncthreads();
  for (unsigned w = 0; w < blockDim.x / 32; ++w) v = fmaxf(v, of_warps[w]);
  __syncthreads();
  return v;
}

}  // namespace sluice::kernels::cuda
