// A few small copies in one launch: requests to CPU workers, and their answers.
//
// The kernel moves the rows over the link (10 rows of 40 heads of 128: 205 KB of queries or
// results). Floor: the link, and one latency of it. A warp takes 2 KiB of a row at a time and
// starts all of its loads before the first store. Data that CPUs wrote is read past every cache.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/move.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kLoads = 4;  // loads in flight per lane
constexpr int kItemBytes = kLoads * kWarp * static_cast<int>(sizeof(uint4));
constexpr int kMaxBlocks = 32;  // the other multiprocessors are left to the model

// Cumulative items of the pieces up to and including each one, and the items of one row of each.
struct Plan {
  int32_t end[kMaxRowsPieces];
  int32_t row_items[kMaxRowsPieces];
};

template <typename T>
__device__ __forceinline__ void CopyItem(char* target, const char* source, int bytes) {
  const int count = bytes / static_cast<int>(sizeof(T));
  for (int first = threadIdx.x % kWarp; first < count; first += kLoads * kWarp) {
    T value[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = first + i * kWarp;
      if (at < count) value[i] = __ldcv(reinterpret_cast<const T*>(source) + at);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = first + i * kWarp;
      if (at < count) reinterpret_cast<T*>(target)[at] = value[i];
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    CopyRowsKernel(const __grid_constant__ CopyRowsParams p, const __grid_constant__ Plan plan) {
  WaitForPriorKernels();
  LetNextKernelStart();
  const int last = plan.end[p.count - 1];
  for (int item = blockIdx.x * kWarps + threadIdx.x / kWarp; item < last;
       item += gridDim.x * kWarps) {
    int i = 0;
    while (item >= plan.end[i]) ++i;
    const RowsPiece& piece = p.pieces[i];
    const int own = item - (i > 0 ? plan.end[i - 1] : 0);
    const int row = own / plan.row_items[i];
    const int64_t from = piece.source_rows != nullptr ? piece.source_rows[row] : row;
    if (from < 0) continue;
    const int begin = own % plan.row_items[i] * kItemBytes;
    const int end =
        piece.words != nullptr ? min(piece.row_bytes, 4 * piece.words[row]) : piece.row_bytes;
    const int bytes = min(end - begin, kItemBytes);
    if (bytes <= 0) continue;
    char* const target = static_cast<char*>(piece.target) + row * piece.target_pitch + begin;
    const char* const source =
        static_cast<const char*>(piece.source) + from * piece.source_pitch + begin;
    if (bytes % sizeof(uint4) == 0 && BothAligned(source, target, sizeof(uint4))) {
      CopyItem<uint4>(target, source, bytes);
    } else {
      CopyItem<uint32_t>(target, source, bytes);
    }
  }
}

bool IsValid(const RowsPiece& piece) {
  const uintptr_t bits =
      reinterpret_cast<uintptr_t>(piece.source) | reinterpret_cast<uintptr_t>(piece.target) |
      static_cast<uintptr_t>(piece.source_pitch | piece.target_pitch | piece.row_bytes);
  return piece.rows >= 0 && piece.row_bytes >= 0 && bits % sizeof(uint32_t) == 0;
}

}  // namespace

cudaError_t LaunchCopyRows(const CopyRowsParams& p, cudaStream_t stream) {
  if (p.count < 0 || p.count > kMaxRowsPieces) return cudaErrorInvalidValue;
  Plan plan{};
  int64_t items = 0;
  for (int i = 0; i < p.count; ++i) {
    if (!IsValid(p.pieces[i])) return cudaErrorInvalidValue;
    plan.row_items[i] = (p.pieces[i].row_bytes + kItemBytes - 1) / kItemBytes;
    items += int64_t{p.pieces[i].rows} * plan.row_items[i];
    if (items > INT32_MAX) return cudaErrorInvalidValue;
    plan.end[i] = static_cast<int32_t>(items);
  }
  if (items == 0) return cudaSuccess;
  const int64_t blocks = std::min<int64_t>((items + kWarps - 1) / kWarps, kMaxBlocks);
  return LaunchKernel(CopyRowsKernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
                      stream, p, plan);
}

}  // namespace sluice::kernels::cuda
