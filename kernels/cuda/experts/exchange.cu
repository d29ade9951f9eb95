// These kernels take rows to the ranks of their experts and add the sums that come back. All of it
// is copies: the bytes of a step are few, and the time of each kernel is its latency. Nothing here
// has been measured yet.
#include "kernels/cuda/experts/exchange.h"

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/quantise.cuh"
#include "kernels/cuda/common/vectors.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kWarpSize = 32;
constexpr int kThreads = 256;
constexpr int kTile = 4 * kThreads;  // elements of a row that a block takes at a time

// One warp lists the rows of one rank, 32 at a time.
__global__ void __launch_bounds__(kWarpSize) PackPlacesKernel(PackRowsParams p) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const int rank = blockIdx.x, lane = threadIdx.x;
  const int first = rank * p.experts_each;
  int count = 0;
  for (int start = 0; start < p.rows; start += kWarpSize) {
    const int row = start + lane;
    bool there = false;
    for (int j = 0; row < p.rows && j < p.choices; ++j) {
      const int expert = PhysicalExpert(p, int64_t{row} * p.choices + j);
      const bool own = expert >= first && expert < first + p.experts_each;
      there = there || own;
      if (own && p.load != nullptr) {
        // Nothing waits for the sum.
        auto* const load = reinterpret_cast<unsigned long long*>(p.load);
        atomicAdd(load + p.chosen[int64_t{row} * p.choices + j], 1ull);
      }
    }
    const unsigned all = __ballot_sync(kAll, there);
    if (row < p.rows) {
      const int index = count + __popc(all & ((1u << lane) - 1));
      p.places[int64_t{row} * p.ranks + rank] = there ? rank * p.capacity + index : -1;
    }
    count += __popc(all);
  }
  if (lane == 0) p.counts[rank] = count;
}

__device__ __forceinline__ float4 WidenBf16(uint2 four) {
  return {__uint_as_float(four.x << 16), __uint_as_float(four.x & 0xFFFF0000u),
          __uint_as_float(four.y << 16), __uint_as_float(four.y & 0xFFFF0000u)};
}

// The grid is (rows, ranks). A warp takes 128 columns at a time, which have one scale.
__global__ void __launch_bounds__(kThreads) PackRowsKernel(PackRowsParams p, RowUnit layout) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const int64_t row = blockIdx.x;
  const int rank = blockIdx.y, lane = threadIdx.x % kWarpSize;
  const int64_t place = p.places[row * p.ranks + rank];
  if (place < 0) return;
  char* unit = static_cast<char*>(p.units) + place * layout.bytes;
  const auto* x = static_cast<const uint16_t*>(p.x) + row * p.dim;
  for (int begin = 0; begin < p.dim; begin += kTile) {
    const int i = begin + 4 * threadIdx.x;
    const bool inside = i < p.dim;
    const uint2 four = inside ? *reinterpret_cast<const uint2*>(x + i) : uint2{0, 0};
    if (p.type == DType::kBFloat16) {
      if (inside) *reinterpret_cast<uint2*>(unit + i * 2) = four;
      continue;
    }
    const float4 v = WidenBf16(four);
    const float scale = WarpScale(v);
    if (!inside) continue;
    *reinterpret_cast<uint32_t*>(unit + i) = Quantised(v, scale);
    if (lane == 0) reinterpret_cast<float*>(unit + layout.scales)[i / kFp8BlockColumns] = scale;
  }
  if (threadIdx.x >= p.choices) return;
  const int64_t choice = row * p.choices + threadIdx.x;
  const int expert = PhysicalExpert(p, choice), own = expert - rank * p.experts_each;
  const bool there = expert >= 0 && own >= 0 && own < p.experts_each;
  reinterpret_cast<int32_t*>(unit + layout.choices)[threadIdx.x] = there ? own : -1;
  reinterpret_cast<float*>(unit + layout.weights)[threadIdx.x] = there ? p.weights[choice] : 0;
}

// The grid is (capacity, ranks).
__global__ void __launch_bounds__(kThreads) UnpackRowsKernel(UnpackRowsParams p, RowUnit layout) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const int64_t row = int64_t{blockIdx.y} * p.capacity + blockIdx.x;
  const bool there = static_cast<int>(blockIdx.x) < p.counts[blockIdx.y];
  const char* unit = static_cast<const char*>(p.units) + row * layout.bytes;
  if (threadIdx.x < p.choices) {
    const int64_t choice = row * p.choices + threadIdx.x;
    p.chosen[choice] =
        there ? reinterpret_cast<const int32_t*>(unit + layout.choices)[threadIdx.x] : -1;
    p.weights[choice] =
        there ? reinterpret_cast<const float*>(unit + layout.weights)[threadIdx.x] : 0;
  }
  if (!there) return;
  auto* x = static_cast<uint16_t*>(p.x) + row * p.dim;
  for (int i = 4 * threadIdx.x; i < p.dim; i += kTile) {
    uint2 four;
    if (p.type == DType::kBFloat16) {
      four = *reinterpret_cast<const uint2*>(unit + i * 2);
    } else {
      const float scale =
          reinterpret_cast<const float*>(unit + layout.scales)[i / kFp8BlockColumns];
      const uint2 halves = WidenE4M3(*reinterpret_cast<const uint32_t*>(unit + i));
      const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&halves.x));
      const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&halves.y));
      four = {PackBf16(low.x * scale, low.y * scale), PackBf16(high.x * scale, high.y * scale)};
    }
    *reinterpret_cast<uint2*>(x + i) = four;
    *reinterpret_cast<float4*>(p.sums + row * p.dim + i) = {0, 0, 0, 0};
  }
}

// The grid is (rows, ceil(dim / kTile)).
__global__ void __launch_bounds__(kThreads) AddPartsKernel(AddPartsParams p) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const int64_t row = blockIdx.x;
  const int i = blockIdx.y * kTile + 4 * threadIdx.x;
  if (i >= p.dim) return;
  float4 sum = {0, 0, 0, 0};
  for (int rank = 0; rank < p.ranks; ++rank) {
    const int64_t place = p.places[row * p.ranks + rank];
    if (place < 0) continue;
    const float4 part = *reinterpret_cast<const float4*>(p.parts + place * p.dim + i);
    sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
  }
  auto* out = reinterpret_cast<float4*>(p.out + row * p.dim + i);
  const float4 before = *out;
  *out = {before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w};
}

bool Takes(int32_t dim, int32_t choices, int32_t ranks, int32_t experts_each, DType x_type,
           DType type) {
  return dim > 0 && dim % 4 == 0 && choices > 0 && choices <= kThreads && ranks > 0 &&
         ranks <= kMaxExchangeRanks && experts_each > 0 && x_type == DType::kBFloat16 &&
         type != DType::kFloat32;
}

}  // namespace

cudaError_t LaunchPackRows(const PackRowsParams& p, cudaStream_t stream) {
  if (!Takes(p.dim, p.choices, p.ranks, p.experts_each, p.x_type, p.type) || p.rows < 0 ||
      p.rows > p.capacity || !AreAligned(8, p.x) || !AreAligned(16, p.units)) {
    return cudaErrorInvalidValue;
  }
  const cudaError_t error =
      LaunchKernel(PackPlacesKernel, static_cast<unsigned>(p.ranks), kWarpSize, 0, stream, p);
  if (error != cudaSuccess || p.rows == 0) return error;
  const dim3 grid(static_cast<unsigned>(p.rows), static_cast<unsigned>(p.ranks));
  return LaunchKernel(PackRowsKernel, grid, kThreads, 0, stream, p,
                      RowUnitOf(p.dim, p.choices, p.type));
}

cudaError_t LaunchUnpackRows(const UnpackRowsParams& p, cudaStream_t stream) {
  if (!Takes(p.dim, p.choices, p.ranks, p.experts_each, p.x_type, p.type) || p.capacity < 1 ||
      !AreAligned(16, p.x, p.units, p.sums)) {
    return cudaErrorInvalidValue;
  }
  const dim3 grid(static_cast<unsigned>(p.capacity), static_cast<unsigned>(p.ranks));
  const cudaError_t error = LaunchKernel(UnpackRowsKernel, grid, kThreads, 0, stream, p,
                                         RowUnitOf(p.dim, p.choices, p.type));
  if (error != cudaSuccess) return error;
  return LaunchRoutePairs(PairsOf(p), stream);
}

cudaError_t LaunchAddParts(const AddPartsParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.dim < 1 || p.dim % 4 != 0 || p.ranks < 1 || !AreAligned(16, p.parts, p.out)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(p.rows),
                  static_cast<unsigned>((p.dim + kTile - 1) / kTile));
  return LaunchKernel(AddPartsKernel, grid, kThreads, 0, stream, p);
}

}  // namespace sluice::kernels::cuda
