// Entries of latent caches, and the queries that are scored against them: norm, interleaved RoPE,
// rounding.
#include <cstdint>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/paged_rows.cuh"
#include "kernels/cuda/common/quantise.cuh"
#include "kernels/cuda/common/vectors.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kWarpSize = 32;
constexpr int kEntryThreads = 128;
constexpr int kEntryWarps = kEntryThreads / kWarpSize;
constexpr int kMaxVectors = 4;
constexpr int kMaxRank = 4 * kMaxVectors * kEntryThreads;
constexpr int kQueriesPerBlock = 4;  // one warp each
constexpr int kMaxRows = 65535;      // the grid's y has 16 bits

// Rotates a neighbouring pair by its angle.
__device__ __forceinline__ float2 Turned(float2 x, float2 turn) {
  return {x.x * turn.x - x.y * turn.y, x.y * turn.x + x.x * turn.y};
}

__device__ __forceinline__ void StorePair(void* out, DType type, int64_t index, float2 v) {
  if (type == DType::kFloat32) {
    *reinterpret_cast<float2*>(static_cast<float*>(out) + index) = v;
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(out) + index) = PackBf16(v.x, v.y);
  }
}

// Returns the sum over the block, the same in every thread, added in a fixed order.
__device__ __forceinline__ float EntrySum(float sum) {
  __shared__ float partial[kEntryWarps];
  sum = WarpSum(sum);
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  sum = partial[0];
#pragma unroll
  for (int w = 1; w < kEntryWarps; ++w) sum += partial[w];
  return sum;
}

// Returns the address of the row's entry in the cache, or null. REQUIRES: WaitForPriorKernels()
// was called, since another kernel assigns slots.
__device__ __forceinline__ char* EntryAt(const LatentAppendParams& p, int slot, int position) {
  const PagedLatents& c = p.cache;
  if (c.base == nullptr) return nullptr;
  int entry = position;
  if (p.place_of.base != nullptr) entry = *RowAt<int32_t>(p.place_of, slot, position, 0);
  if (entry < 0) return nullptr;
  const int64_t page = c.block_table[slot * c.table_stride + entry / c.block_tokens];
  return static_cast<char*>(c.base) + page * c.page_bytes +
         entry % c.block_tokens * EntryBytes(c.type, c.rank, c.rope);
}

// The grid is (rows). Thread t holds values 4 t .. 4 t + 3 of each 512 of the latent, so that a
// warp holds the 128 values of a scale. The first rope / 2 threads rotate the other values. The
// kernel moves 2.3 KB in and 656 bytes out a row (twice with `written`): at 128 rows 0.4 MB, 0.1
// us of HBM, so its cost is that of the launch. Measured (H200, packed, written twice, launches
// one after the other in a graph): 1.8 us at 1 row, 1.9 at 64, 2.8 at 512. That was before a
// group's scale was the best of eight, which takes some 300 more instructions of a warp and has
// not been timed.
__global__ void __launch_bounds__(kEntryThreads)
    LatentAppendKernel(LatentAppendParams p, bool aligned) {
  LetNextKernelStart();
  const PagedLatents& c = p.cache;
  const int64_t row = blockIdx.x;
  const int t = threadIdx.x;
  const int slot = p.slots[row];
  const int position = p.positions[row];
  float4 weight[kMaxVectors];
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    weight[v] = Load4(p.norm, 4 * (t + v * kEntryThreads), c.rank, aligned);
  }
  if (t == 0 && slot >= 0 && c.base != nullptr && p.place_of.base != nullptr) {
    // The prefetch is only a hint: a step's weights have passed through L2 since the entry was
    // written.
    asm volatile("prefetch.global.L2 [%0];" ::"l"(RowAt<int32_t>(p.place_of, slot, position, 0)));
  }
  WaitForPriorKernels();
  if (slot < 0) return;  // true for the whole block

  const float* in = p.kv + row * p.kv_stride;
  float4 x[kMaxVectors];
  float sum = 0;
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    x[v] = Load4(in, 4 * (t + v * kEntryThreads), c.rank, aligned);
    sum += (x[v].x * x[v].x + x[v].y * x[v].y) + (x[v].z * x[v].z + x[v].w * x[v].w);
  }
  const float mean = EntrySum(sum) / static_cast<float>(c.rank);
  const float factor = 1.0f / sqrtf(mean + p.epsilon);
  char* const out[2] = {EntryAt(p, slot, position),
                        p.written == nullptr ? nullptr
                                             : static_cast<char*>(p.written) +
                                                   row * EntryBytes(c.type, c.rank, c.rope)};
  const bool packed = c.type == DType::kFloat8E4M3;
#pragma unroll
  for (int v = 0; v < kMaxVectors; ++v) {
    const int i = 4 * (t + v * kEntryThreads);
    if (4 * v * kEntryThreads >= c.rank) break;
    const float4 y = {x[v].x * factor * weight[v].x, x[v].y * factor * weight[v].y,
                      x[v].z * factor * weight[v].z, x[v].w * factor * weight[v].w};
    if (packed) {
      const float scale = WarpLatentScale(y);
      const uint32_t values = Quantised(y, scale);
      for (char* entry : out) {
        if (entry == nullptr) continue;
        *reinterpret_cast<uint32_t*>(entry + i) = values;
        if (t % kWarpSize == 0) {
          reinterpret_cast<float*>(entry + kPackedRank)[i / kPackedScaleTokens] = scale;
        }
      }
    } else {
      for (char* entry : out) {
        if (entry != nullptr) Store4(entry, c.type, 0, i, c.rank, aligned, y);
      }
    }
  }
  // The RoPE values lie behind the latent values, and in the packed form behind their scales too.
  const int64_t rope_begin =
      packed ? kPackedRank + 4 * (kPackedRank / kPackedScaleTokens) : c.rank * SizeOf(c.type);
  const DType rope_type = packed ? DType::kBFloat16 : c.type;
  for (int pair = t; 2 * pair < c.rope; pair += kEntryThreads) {
    const float2 turn = reinterpret_cast<const float2*>(p.cos_sin + row * c.rope)[pair];
    const float2 y = Turned({in[c.rank + 2 * pair], in[c.rank + 2 * pair + 1]}, turn);
    for (char* entry : out) {
      if (entry != nullptr) StorePair(entry + rope_begin, rope_type, 2 * pair, y);
    }
  }
}

// One warp handles one (row, head); the grid is (ceil(heads / 4), rows). The kernel moves 4 bytes
// in and 2 (bf16) out per element: at 128 heads of 192 0.15 MB a row, which 64 rows read from L2.
// Measured (H200, as above, 128 heads): 1.2 us at 1 row, 3.4 at 64, 22 at 512, whose 75 MB take
// 17 us.
__global__ void __launch_bounds__(kQueriesPerBlock* kWarpSize)
    MlaQueryKernel(MlaQueryParams p, bool aligned) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const int64_t row = blockIdx.y;
  const int head = blockIdx.x * kQueriesPerBlock + threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (head >= p.heads) return;
  const int64_t at = row * p.heads + head;
  const float* q = p.q + at * (p.nope_dim + p.rope);
  for (int i = 4 * lane; i < p.nope_dim; i += 4 * kWarpSize) {
    Store4(p.nope, p.type, at * p.nope_dim, i, p.nope_dim, aligned,
           Load4(q, i, p.nope_dim, aligned));
  }
  const float2* turns = reinterpret_cast<const float2*>(p.cos_sin + row * p.rope);
  for (int pair = lane; 2 * pair < p.rope; pair += kWarpSize) {
    const float2 x = *reinterpret_cast<const float2*>(q + p.nope_dim + 2 * pair);
    StorePair(p.out, p.type, at * (p.rank + p.rope) + p.rank + 2 * pair, Turned(x, turns[pair]));
  }
}

constexpr bool IsEven(int32_t a, int32_t b, int32_t c) { return (a | b | c) % 2 == 0; }

}  // namespace

cudaError_t LaunchLatentAppend(const LatentAppendParams& p, cudaStream_t stream) {
  const PagedLatents& c = p.cache;
  const bool packed = c.type == DType::kFloat8E4M3;
  if (p.rows < 0 || c.rank < 2 || c.rank > kMaxRank || c.rope < 0 || !IsEven(c.rank, c.rope, 0) ||
      (c.base != nullptr && c.block_tokens < 1) ||
      (packed && (c.rank != kPackedRank || c.rope != kPackedRope)) ||
      !AreAligned(8, p.cos_sin, c.base, p.written) || c.page_bytes % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  // An entry is a multiple of 16 bytes if these conditions hold.
  const bool aligned = c.rank % 4 == 0 && c.rope % 4 == 0 && p.kv_stride % 4 == 0 &&
                       c.page_bytes % 16 == 0 && AreAligned(16, p.kv, p.norm, c.base, p.written);
  return LaunchKernel(LatentAppendKernel, p.rows, kEntryThreads, 0, stream, p, aligned);
}

cudaError_t LaunchMlaQuery(const MlaQueryParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.rows > kMaxRows || p.heads < 1 || p.nope_dim < 0 || p.rope < 0 ||
      p.rank < 0 || !IsEven(p.nope_dim, p.rope, p.rank) || p.type == DType::kFloat8E4M3 ||
      !AreAligned(8, p.q, p.cos_sin, p.nope, p.out)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const bool aligned = p.nope_dim % 4 == 0 && p.rope % 4 == 0 && AreAligned(16, p.q, p.nope);
  const dim3 grid((p.heads + kQueriesPerBlock - 1) / kQueriesPerBlock, p.rows);
  return LaunchKernel(MlaQueryKernel, grid, kQueriesPerBlock * kWarpSize, 0, stream, p, aligned);
}

}  // namespace sluice::kernels::cuda
