// RMSNorm: one block per row, with the row in registers.
#include <cstdint>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/vectors.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kWarpSize = 32;

// Returns the sum over the block, in an order that depends on the block's size alone.
__device__ float BlockSum(float sum) {
  __shared__ float partial[kMaxThreads / kWarpSize];
  for (int lane = kWarpSize / 2; lane > 0; lane /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lane);
  }
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  const int warps = blockDim.x / kWarpSize;
  sum = threadIdx.x % kWarpSize < warps ? partial[threadIdx.x % kWarpSize] : 0;
  for (int lane = kWarpSize / 2; lane > 0; lane /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lane);
  }
  return sum;
}

// The grid is (rows). Thread t holds vectors t, t + threads, ... of the row and of the weights.
// The loads of the weights start before the kernel that makes x is done. The kernel moves 4 + 2
// (bf16) bytes per element, and the weights. Measured (H100, dim 4096, launches one after the
// other in a graph): 1.3 us at 1 and 8 rows, 1.9 us at 64, whose bytes take 0.65 us.
template <int kVectors>
__global__ void __launch_bounds__(kMaxThreads) RmsNormKernel(RmsNormParams p, bool aligned) {
  LetNextKernelStart();
  float4 weight[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    weight[v] = Load4(p.weight, 4 * (threadIdx.x + v * blockDim.x), p.dim, aligned);
  }
  const bool also = static_cast<int32_t>(blockIdx.x) < p.also_rows;
  float4 also_weight[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    also_weight[v] = {0, 0, 0, 0};
    if (also) {
      also_weight[v] = Load4(p.also_weight, 4 * (threadIdx.x + v * blockDim.x), p.dim, aligned);
    }
  }
  WaitForPriorKernels();
  const int64_t row = blockIdx.x;
  const int64_t source = p.row_index != nullptr ? p.row_index[row] : row;
  float4 x[kVectors];
  float sum = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    x[v] = {0, 0, 0, 0};
    if (source >= 0) {
      const int i = 4 * (threadIdx.x + v * blockDim.x);
      x[v] = Load4(p.x + source * p.x_stride, i, p.dim, aligned);
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    sum += (x[v].x * x[v].x + x[v].y * x[v].y) + (x[v].z * x[v].z + x[v].w * x[v].w);
  }
  const float mean = BlockSum(sum) / static_cast<float>(p.dim);
  const float factor = 1.0f / sqrtf(mean + p.epsilon);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int i = 4 * (threadIdx.x + v * blockDim.x);
    float4 y = {0, 0, 0, 0};
    if (source >= 0) {
      y = {x[v].x * factor * weight[v].x, x[v].y * factor * weight[v].y,
           x[v].z * factor * weight[v].z, x[v].w * factor * weight[v].w};
    }
    Store4(p.out, p.out_type, row * p.dim, i, p.dim, aligned, y);
    if (!also) continue;
    float4 z = {0, 0, 0, 0};
    if (source >= 0) {
      z = {x[v].x * factor * also_weight[v].x, x[v].y * factor * also_weight[v].y,
           x[v].z * factor * also_weight[v].z, x[v].w * factor * also_weight[v].w};
    }
    Store4(p.also_out, p.out_type, row * p.dim, i, p.dim, aligned, z);
  }
}

}  // namespace

cudaError_t LaunchRmsNorm(const RmsNormParams& p, cudaStream_t stream) {
  constexpr int kFewVectors = 2, kManyVectors = 4;
  static_assert(4 * kManyVectors * kMaxThreads == kMaxNormDim, "a row fits its block");
  if (p.rows < 0 || p.dim < 1 || p.dim > kMaxNormDim || p.also_rows < 0 || p.also_rows > p.rows) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const bool aligned = p.dim % 4 == 0 && p.x_stride % 4 == 0 &&
                       AreAligned(16, p.x, p.weight, p.out) &&
                       AreAligned(16, p.x, p.also_weight, p.also_out);
  const int vectors = p.dim <= 4 * kFewVectors * kMaxThreads ? kFewVectors : kManyVectors;
  const int elements_per_warp = 4 * vectors * kWarpSize;
  const int threads = (p.dim + elements_per_warp - 1) / elements_per_warp * kWarpSize;
  return LaunchKernel(
      vectors == kFewVectors ? RmsNormKernel<kFewVectors> : RmsNormKernel<kManyVectors>, p.rows,
      threads, 0, stream, p, aligned);
}

}  // namespace sluice::kernels::cuda
