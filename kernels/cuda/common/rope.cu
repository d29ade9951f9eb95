// Rotary embedding: the table of a step's angles, and the norm, rotation and append of each
// layer.
#include <cstdint>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/scalar.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kTableThreads = 128;
constexpr int kWarpSize = 32;
constexpr int kHeadsPerBlock = 4;  // one warp each
constexpr int kMaxHeadDim = 256;
// A lane holds elements 2 * lane + 64 * j and their neighbour, of each half of a head.
constexpr int kMaxVectors = kMaxHeadDim / 2 / (2 * kWarpSize);

// One thread computes one (row, frequency). The kernel runs once per step, not per layer. The
// sines are taken in float64, so that they are the reference's at any position. Measured (H100,
// head_dim 128): 0.9 us at 1 to 64 rows.
__global__ void __launch_bounds__(kTableThreads) RopeTableKernel(RopeTableParams p) {
  LetNextKernelStart();
  const int64_t item = int64_t{blockIdx.x} * kTableThreads + threadIdx.x;
  const bool inside = item < int64_t{p.rows} * p.half_dim;
  const float frequency = inside ? p.inv_freq[item % p.half_dim] : 0;
  WaitForPriorKernels();
  if (!inside) return;
  const float angle = static_cast<float>(p.positions[item / p.half_dim]) * frequency;
  double sine, cosine;
  sincos(static_cast<double>(angle), &sine, &cosine);
  const double scale = p.scale;
  reinterpret_cast<float2*>(p.cos_sin)[item] = {static_cast<float>(scale * cosine),
                                                static_cast<float>(scale * sine)};
}

// Returns 1 / sqrt(mean(x^2) + epsilon) of the head that a warp holds.
__device__ __forceinline__ float InverseRms(const float2 (&low)[kMaxVectors],
                                            const float2 (&high)[kMaxVectors], int head_dim,
                                            float epsilon) {
  float sum = 0;
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    sum += (low[v].x * low[v].x + low[v].y * low[v].y) +
           (high[v].x * high[v].x + high[v].y * high[v].y);
  }
  for (int lane = kWarpSize / 2; lane > 0; lane /= 2) {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lane);
  }
  return 1.0f / sqrtf(sum / static_cast<float>(head_dim) + epsilon);
}

__device__ __forceinline__ float2 Scaled(float2 x, float factor, float2 weight) {
  return {x.x * factor * weight.x, x.y * factor * weight.y};
}

// Stores two elements at `index` of an array of `type`.
__device__ __forceinline__ void StorePair(void* out, DType type, int64_t index, float2 v) {
  if (type == DType::kFloat32) {
    *reinterpret_cast<float2*>(static_cast<float*>(out) + index) = v;
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(out) + index) = PackBf16(v.x, v.y);
  }
}

// One warp handles one (row, head), with heads in the order of a row of qkv. It rotates a query
// in place, rotates and appends a key, and appends a value. The grid is (ceil((heads + 2
// kv_heads) / 4), rows). The norm's weights, the row's slot and its address in the cache come
// from tables that no kernel writes, and are read before the kernel that makes qkv is done. The
// kernel moves 8 bytes per element of q, 4 + 2 (bf16) per element of k and v, and 2 more for the
// copy. Measured (H100, 32 + 16 heads of 128, launches one after the other in a graph): 1.2 us at
// 1 and 8 rows, 1.8 us at 64, whose bytes take 1.2 us.
__global__ void __launch_bounds__(kHeadsPerBlock* kWarpSize) RopeAppendKernel(RopeAppendParams p) {
  LetNextKernelStart();
  const PagedCache& c = p.cache;
  const int64_t row = blockIdx.y;
  const int head = blockIdx.x * kHeadsPerBlock + threadIdx.x / kWarpSize;
  const int half = c.head_dim / 2;
  const int first = 2 * (threadIdx.x % kWarpSize);  // this lane's first element of each half
  const bool is_query = head < p.heads;
  const bool is_key = !is_query && head < p.heads + c.kv_heads;
  const int slot = p.slots[row];
  const bool works = slot >= 0 && head < p.heads + 2 * c.kv_heads;
  const int kv_head = is_query || !works ? 0 : (head - p.heads) % c.kv_heads;

  const float* norm = is_query ? p.q_norm : is_key ? p.k_norm : nullptr;
  float2 low_weight[kMaxVectors], high_weight[kMaxVectors];
  int64_t key_index = 0;
  if (works) {
#pragma unroll
    for (int v = 0; v < kMaxVectors; ++v) {
      const int i = first + v * 2 * kWarpSize;
      if (norm == nullptr || i >= half) continue;
      low_weight[v] = *reinterpret_cast<const float2*>(norm + i);
      high_weight[v] = *reinterpret_cast<const float2*>(norm + half + i);
    }
    if (!is_query) key_index = KeyIndex(c, slot, p.positions[row], kv_head);
  }
  WaitForPriorKernels();
  if (!works) return;

  float* x = p.qkv + (row * (p.heads + 2 * c.kv_heads) + head) * c.head_dim;
  float2 low[kMaxVectors], high[kMaxVectors];
  float4 turn[kMaxVectors];  // cosines and sines of this lane's two pairs
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    const int i = first + v * 2 * kWarpSize;
    low[v] = high[v] = {0, 0};
    if (i >= half) continue;
    low[v] = *reinterpret_cast<const float2*>(x + i);
    high[v] = *reinterpret_cast<const float2*>(x + half + i);
    if (is_query || is_key) {
      turn[v] = *reinterpret_cast<const float4*>(p.cos_sin + row * c.head_dim + 2 * i);
    }
  }
  if (norm != nullptr) {
    const float factor = InverseRms(low, high, c.head_dim, p.epsilon);
#pragma unroll
    for (int v = 0; v < kMaxVectors; ++v) {
      low[v] = Scaled(low[v], factor, low_weight[v]);
      high[v] = Scaled(high[v], factor, high_weight[v]);
    }
  }
  // Targets of k or v: the index in the page, and the index in the dense copy.
  const int64_t in_cache = key_index + (is_key ? 0 : int64_t{c.block_tokens} * c.head_dim);
  const int64_t in_copy = ((row * c.kv_heads + kv_head) * 2 + (is_key ? 0 : 1)) * c.head_dim;
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    const int i = first + v * 2 * kWarpSize;
    if (i >= half) continue;
    if (is_query || is_key) {
      const float4 t = turn[v];
      const float2 a = low[v], b = high[v];
      low[v] = {a.x * t.x - b.x * t.y, a.y * t.z - b.y * t.w};
      high[v] = {b.x * t.x + a.x * t.y, b.y * t.z + a.y * t.w};
    }
    if (is_query) {
      *reinterpret_cast<float2*>(x + i) = low[v];
      *reinterpret_cast<float2*>(x + half + i) = high[v];
      continue;
    }
    StorePair(c.base, c.type, in_cache + i, low[v]);
    StorePair(c.base, c.type, in_cache + half + i, high[v]);
    if (p.written == nullptr) continue;
    StorePair(p.written, c.type, in_copy + i, low[v]);
    StorePair(p.written, c.type, in_copy + half + i, high[v]);
  }
}

constexpr int kMaxRows = 65535;  // the grid's y has 16 bits

}  // namespace

cudaError_t LaunchRopeTable(const RopeTableParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.half_dim < 1) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  const int64_t items = int64_t{p.rows} * p.half_dim;
  const auto blocks = static_cast<unsigned>((items + kTableThreads - 1) / kTableThreads);
  return LaunchKernel(RopeTableKernel, blocks, kTableThreads, 0, stream, p);
}

cudaError_t LaunchRopeAppend(const RopeAppendParams& p, cudaStream_t stream) {
  const PagedCache& c = p.cache;
  const bool appends = c.kv_heads > 0;  // queries alone have no cache
  if (p.rows < 0 || p.rows > kMaxRows || p.heads < 1 || c.kv_heads < 0 || c.head_dim < 4 ||
      c.head_dim > kMaxHeadDim || c.head_dim % 4 != 0 || (appends && c.block_tokens < 1) ||
      !AreAligned(16, p.qkv, p.q_norm, p.k_norm, p.cos_sin, c.base, p.written)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const int heads = p.heads + 2 * c.kv_heads;
  const dim3 grid((heads + kHeadsPerBlock - 1) / kHeadsPerBlock, p.rows);
  return LaunchKernel(RopeAppendKernel, grid, kHeadsPerBlock * kWarpSize, 0, stream, p);
}

}  // namespace sluice::kernels::cuda
