// The indexer's keys and queries: norm, half-split RoPE, Hadamard transform, rounding. A warp
// holds the 128 elements of a row's head, four neighbours a lane.
#include <cstdint>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/quantise.cuh"
#include "kernels/cuda/common/vectors.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kWarpSize = 32;
constexpr int kPerBlock = 4;     // warps per block
constexpr int kMaxRows = 65535;  // the grid's y has 16 bits
constexpr int kRopeDimStep = 8;  // so that a lane's partners are all in one lane
constexpr float kHadamardScale = 0.08838834764831845f;  // 128^-1/2
static_assert(kIndexDim == 4 * kWarpSize);

__device__ __forceinline__ float4 Shuffled(float4 v, int lane) {
  return {__shfl_sync(kAll, v.x, lane), __shfl_sync(kAll, v.y, lane), __shfl_sync(kAll, v.z, lane),
          __shfl_sync(kAll, v.w, lane)};
}

// Rotates element i with element i + rope_dim / 2, for i < rope_dim / 2. `turns` holds the row's
// cos and sin.
__device__ __forceinline__ float4 Rope(float4 v, const float* turns, int rope_dim) {
  const int lane = threadIdx.x % kWarpSize;
  const int half = rope_dim / kRopeDimStep;  // in lanes
  const bool turned = lane < 2 * half, is_low = lane < half;
  const float4 other = Shuffled(v, !turned ? lane : is_low ? lane + half : lane - half);
  if (!turned) return v;
  const float4* at = reinterpret_cast<const float4*>(turns + 8 * (is_low ? lane : lane - half));
  const float4 a = at[0], b = at[1];  // cos, sin of two pairs each
  const float sign = is_low ? -1.0f : 1.0f;
  return {v.x * a.x + sign * (other.x * a.y), v.y * a.z + sign * (other.y * a.w),
          v.z * b.x + sign * (other.z * b.y), v.w * b.z + sign * (other.w * b.w)};
}

// Applies the Walsh-Hadamard transform of 128, scaled by 128^-1/2.
__device__ __forceinline__ float4 Hadamard(float4 v) {
  v = {v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w};
  v = {v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w};
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int lane = threadIdx.x % kWarpSize;
    const float4 other = Shuffled(v, lane ^ step);
    const float sign = (lane & step) != 0 ? -1.0f : 1.0f;
    v = {sign * v.x + other.x, sign * v.y + other.y, sign * v.z + other.z, sign * v.w + other.w};
  }
  return {v.x * kHadamardScale, v.y * kHadamardScale, v.z * kHadamardScale, v.w * kHadamardScale};
}

// One warp handles one row. The kernel moves 512 bytes in and 132 out a row (twice with
// `written`), so its cost is that of the launch. Measured (H200, packed, launches one after the
// other in a graph): 1.8 us at 1 row, 1.9 at 64, 2.0 at 512.
__global__ void __launch_bounds__(kPerBlock* kWarpSize)
    IndexAppendKernel(IndexAppendParams p, bool aligned) {
  LetNextKernelStart();
  const PagedIndexKeys& c = p.cache;
  const int64_t row = int64_t{blockIdx.x} * kPerBlock + threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize, i = 4 * lane;
  const int slot = row < p.rows ? p.slots[row] : -1;
  const float4 weight = Load4(p.norm_weight, i, kIndexDim, aligned);
  const float4 bias = Load4(p.norm_bias, i, kIndexDim, aligned);
  WaitForPriorKernels();
  if (slot < 0) return;  // true for the whole warp

  float4 x = Load4(p.k + row * p.k_stride, i, kIndexDim, aligned);
  const float mean = WarpSum((x.x + x.y) + (x.z + x.w)) / kIndexDim;
  x = {x.x - mean, x.y - mean, x.z - mean, x.w - mean};
  const float variance = WarpSum((x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w)) / kIndexDim;
  const float factor = 1.0f / sqrtf(variance + p.epsilon);
  float4 y = {x.x * factor * weight.x + bias.x, x.y * factor * weight.y + bias.y,
              x.z * factor * weight.z + bias.z, x.w * factor * weight.w + bias.w};
  y = Rope(y, p.cos_sin + row * p.rope_dim, p.rope_dim);

  char* page = nullptr;
  int in_page = 0;
  if (c.base != nullptr) {
    const int position = p.positions[row];
    in_page = position % c.block_tokens;
    page = static_cast<char*>(c.base) +
           c.block_table[slot * c.table_stride + position / c.block_tokens] * c.page_bytes;
  }
  if (c.type != DType::kFloat8E4M3) {
    if (page != nullptr)
      Store4(page, c.type, int64_t{in_page} * kIndexDim, i, kIndexDim, aligned, y);
    if (p.written != nullptr) Store4(p.written, c.type, row * kIndexDim, i, kIndexDim, aligned, y);
    return;
  }
  y = Hadamard(y);
  const float scale = WarpScale(y);
  const uint32_t values = Quantised(y, scale);
  if (page != nullptr) {
    *reinterpret_cast<uint32_t*>(page + in_page * kIndexDim + i) = values;
    if (lane == 0) reinterpret_cast<float*>(page + c.block_tokens * kIndexDim)[in_page] = scale;
  }
  if (p.written != nullptr) {
    char* key = static_cast<char*>(p.written) + row * IndexKeyBytes(c.type);
    *reinterpret_cast<uint32_t*>(key + i) = values;
    if (lane == 0) *reinterpret_cast<float*>(key + kIndexDim) = scale;
  }
}

// One warp handles one (row, head); the grid is (ceil(heads / 4), rows). The kernel moves 512
// bytes in and 132 out a head: at 64 heads 41 KB a row. Measured (H200, as above, 64 heads): 1.4
// us at 1 row, 2.6 at 64, 10.5 at 512, whose 21 MB take 5 us.
__global__ void __launch_bounds__(kPerBlock* kWarpSize) IndexQueryKernel(IndexQueryParams p) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const int64_t row = blockIdx.y;
  const int head = blockIdx.x * kPerBlock + threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (head >= p.heads) return;
  const int64_t at = row * p.heads + head;
  float4 q = reinterpret_cast<const float4*>(p.q + at * kIndexDim)[lane];
  q = Rope(q, p.cos_sin + row * p.rope_dim, p.rope_dim);
  float weight = p.weights[row * p.weights_stride + head] * p.weight_scale;
  if (p.type == DType::kFloat8E4M3) {
    q = Hadamard(q);
    const float scale = WarpScale(q);
    static_cast<uint32_t*>(p.out)[at * kWarpSize + lane] = Quantised(q, scale);
    weight *= scale;
  } else {
    static_cast<float4*>(p.out)[at * kWarpSize + lane] = q;
  }
  if (lane == 0) p.out_weights[at] = weight;
}

constexpr bool HasRope(int32_t dim) {
  return dim >= 0 && dim <= kIndexDim && dim % kRopeDimStep == 0;
}

}  // namespace

cudaError_t LaunchIndexAppend(const IndexAppendParams& p, cudaStream_t stream) {
  const PagedIndexKeys& c = p.cache;
  const bool packed = c.type == DType::kFloat8E4M3;
  if (p.rows < 0 || !HasRope(p.rope_dim) || (c.base != nullptr && c.block_tokens < 1) ||
      !AreAligned(16, p.cos_sin) || !AreAligned(packed ? 4 : 16, c.base, p.written) ||
      c.page_bytes % (packed ? 4 : 16) != 0) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const bool aligned = p.k_stride % 4 == 0 && AreAligned(16, p.k, p.norm_weight, p.norm_bias);
  const auto blocks = static_cast<unsigned>((p.rows + kPerBlock - 1) / kPerBlock);
  return LaunchKernel(IndexAppendKernel, blocks, kPerBlock * kWarpSize, 0, stream, p, aligned);
}

cudaError_t LaunchIndexQuery(const IndexQueryParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.rows > kMaxRows || p.heads < 1 || !HasRope(p.rope_dim) ||
      !AreAligned(16, p.q, p.cos_sin, p.out)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const dim3 grid((p.heads + kPerBlock - 1) / kPerBlock, p.rows);
  return LaunchKernel(IndexQueryKernel, grid, kPerBlock * kWarpSize, 0, stream, p);
}

}  // namespace sluice::kernels::cuda
