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

__device__ __forceinline__ float4 Add(const float4& a, const float4& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}
__device__ __forceinline__ float4 Subtract(const float4& a, const float4& b) {
  return {a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w};
}

// Adds the drift to x, a row of the look-ahead, and updates the drift of the layer before.
template <int kVectors>
__device__ void AddDrift(const RmsNormParams& p, int row, bool aligned, float4 (&x)[kVectors]) {
  const AheadNormParams& a = p.ahead;
  const int slot = a.slots == nullptr ? -1 : a.slots[row];
  const int n = slot < 0 ? 0 : a.numbers[row];
  const float weight = fmaxf(kDriftWeight, 1.0f / static_cast<float>(n + 1));
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int i = 4 * (threadIdx.x + v * blockDim.x);
    const float4 own = x[v];
    if (slot >= 0 && n > 0 && a.drift != nullptr) {
      x[v] = Add(own, Load4(a.drift + slot * a.slot_stride, i, p.dim, aligned));
    }
    if (a.before == nullptr) continue;
    if (slot >= 0 && a.drift_before != nullptr) {
      float* const updated = a.drift_before + slot * a.slot_stride;
      const float4 change =
          Subtract(own, Load4(a.before + int64_t{row} * p.dim, i, p.dim, aligned));
      float4 drift = change;
      if (n > 0) {
        const float4 old = Load4(updated, i, p.dim, aligned);
        const float4 step = Subtract(change, old);
        drift = {fmaf(weight, step.x, old.x), fmaf(weight, step.y, old.y),
                 fmaf(weight, step.z, old.z), fmaf(weight, step.w, old.w)};
      }
      Store4(updated, DType::kFloat32, 0, i, p.dim, aligned, drift);
    }
    Store4(a.before, DType::kFloat32, int64_t{row} * p.dim, i, p.dim, aligned, own);
  }
}

// The grid is (rows + rows of the look-ahead). Thread t holds vectors t, t + threads, ... of the
// row and of the weights. The loads of the weights start before the kernel that makes x is done.
// The kernel moves 4 + 2 (bf16) bytes per element, and the weights. Measured (H100, dim 4096,
// launches one after the other in a graph): 1.3 us at 1 and 8 rows, 1.9 us at 64, whose bytes take
// 0.65 us. A row of the look-ahead moves 24 bytes per element more, beside the others.
template <int kVectors>
__global__ void __launch_bounds__(kMaxThreads)
    RmsNormKernel(const __grid_constant__ RmsNormParams p, bool aligned) {
  LetNextKernelStart();
  const bool ahead = static_cast<int32_t>(blockIdx.x) >= p.rows;
  const int64_t row = static_cast<int64_t>(blockIdx.x) - (ahead ? p.rows : 0);
  const float* const weights = ahead ? p.ahead.weight : p.weight;
  float4 weight[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    weight[v] = {0, 0, 0, 0};
    if (weights != nullptr) {
      weight[v] = Load4(weights, 4 * (threadIdx.x + v * blockDim.x), p.dim, aligned);
    }
  }
  WaitForPriorKernels();
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
  if (ahead) {
    AddDrift(p, static_cast<int>(row), aligned, x);
    if (p.ahead.out == nullptr) return;
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
    Store4(ahead ? p.ahead.out : p.out, p.out_type, row * p.dim, i, p.dim, aligned, y);
  }
}

}  // namespace

cudaError_t LaunchRmsNorm(const RmsNormParams& p, cudaStream_t stream) {
  constexpr int kFewVectors = 2, kManyVectors = 4;
  static_assert(4 * kManyVectors * kMaxThreads == kMaxNormDim, "a row fits its block");
  if (p.rows < 0 || p.dim < 1 || p.dim > kMaxNormDim || p.ahead.rows < 0 || p.ahead.rows > p.rows ||
      (p.ahead.rows > 0 && p.row_index != nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const bool aligned = p.dim % 4 == 0 && p.x_stride % 4 == 0 &&
                       AreAligned(16, p.x, p.weight, p.out) &&
                       AreAligned(16, p.x, p.ahead.weight, p.ahead.out) &&
                       AreAligned(16, p.ahead.drift, p.ahead.drift_before, p.ahead.before) &&
                       p.ahead.slot_stride % 4 == 0;
  const int vectors = p.dim <= 4 * kFewVectors * kMaxThreads ? kFewVectors : kManyVectors;
  const int elements_per_warp = 4 * vectors * kWarpSize;
  const int threads = (p.dim + elements_per_warp - 1) / elements_per_warp * kWarpSize;
  return LaunchKernel(
      vectors == kFewVectors ? RmsNormKernel<kFewVectors> : RmsNormKernel<kManyVectors>,
      p.rows + p.ahead.rows, threads, 0, stream, p, aligned);
}

}  // namespace sluice::kernels::cuda
