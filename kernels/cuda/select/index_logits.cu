// IndexLogits in any form: a warp takes a key, head by head. It serves the forms of exactness
// tests, and packed shapes that tensor cores do not take (index_logits_tiles.cu has the others).
//
// The kernel moves the keys once for each row, and reads q and weights from L1. It is bound by
// its instructions: 64 heads take some 800 of a warp for each key.
#include "kernels/cuda/select/index_logits.h"

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/e4m3.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kMaxBlocksOfRow = 512;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Returns elements [4 * lane, 4 * lane + 4) of a row of 128.
__device__ __forceinline__ float4 LaneElements(const void* row, DType type) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (type == DType::kFloat32) return static_cast<const float4*>(row)[lane];
  if (type == DType::kBFloat16) {
    const uint2 v = static_cast<const uint2*>(row)[lane];
    return {__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xFFFF0000u),
            __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xFFFF0000u)};
  }
  const uint32_t v = static_cast<const uint32_t*>(row)[lane];
  return {E4M3ToFloat(static_cast<uint8_t>(v)), E4M3ToFloat(static_cast<uint8_t>(v >> 8)),
          E4M3ToFloat(static_cast<uint8_t>(v >> 16)), E4M3ToFloat(static_cast<uint8_t>(v >> 24))};
}

// Grid: [rows][blocks of a row].
__global__ void __launch_bounds__(32 * kWarps)
    IndexLogitsKernel(const __grid_constant__ IndexLogitsParams p) {
  WaitForPriorKernels();
  LetNextKernelStart();
  const int row = static_cast<int>(blockIdx.x);
  const int slot = p.slots[row];
  if (slot < 0) return;
  const PagedIndexKeys& c = p.cache;
  const DType q_type = c.type == DType::kFloat8E4M3 ? c.type : DType::kFloat32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const char* const q =
      static_cast<const char*>(p.q) + int64_t{row} * p.heads * kIndexDim * SizeOf(q_type);
  const float* const weights = p.weights + int64_t{row} * p.heads;
  const int first = static_cast<int>(blockIdx.y * kWarps + threadIdx.x / 32);
  for (int t = first; t <= p.positions[row]; t += static_cast<int>(gridDim.y) * kWarps) {
    const int64_t page = c.block_table[slot * c.table_stride + t / c.block_tokens];
    const char* const of_page = static_cast<const char*>(c.base) + page * c.page_bytes;
    const int in_page = t % c.block_tokens;
    const float4 k = LaneElements(of_page + int64_t{in_page} * kIndexDim * SizeOf(c.type), c.type);
    float sum = 0;
    for (int h = 0; h < p.heads; ++h) {
      const float4 x = LaneElements(q + int64_t{h} * kIndexDim * SizeOf(q_type), q_type);
      float dot = fmaf(x.w, k.w, fmaf(x.z, k.z, fmaf(x.y, k.y, x.x * k.x)));
#pragma unroll
      for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(kAllLanes, dot, step);
      sum = fmaf(weights[h], fmaxf(dot, 0.0f), sum);
    }
    if (c.type == DType::kFloat8E4M3) {
      sum *= reinterpret_cast<const float*>(of_page + int64_t{c.block_tokens} * kIndexDim)[in_page];
    }
    if (lane == 0) p.scores[row * p.score_stride + t] = sum;
  }
}

}  // namespace

cudaError_t LaunchIndexLogits(const IndexLogitsParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.heads < 1 || p.spare_processors < 0 || p.cache.block_tokens < 1 ||
      reinterpret_cast<uintptr_t>(p.cache.base) % 16 != 0 || p.cache.page_bytes % 4 != 0 ||
      reinterpret_cast<uintptr_t>(p.q) % 16 != 0 ||
      (p.cache.type == DType::kFloat32 && p.cache.page_bytes % 16 != 0) ||
      (p.cache.type == DType::kBFloat16 && p.cache.page_bytes % 8 != 0)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  if (FitsIndexTiles(p)) return LaunchIndexTiles(p, stream);
  const int64_t blocks = (p.score_stride + kWarps - 1) / kWarps;
  return LaunchKernel(IndexLogitsKernel,
                      dim3(static_cast<unsigned>(p.rows),
                           static_cast<unsigned>(min(blocks, int64_t{kMaxBlocksOfRow}))),
                      dim3(32 * kWarps), 0, stream, p);
}

}  // namespace sluice::kernels::cuda
