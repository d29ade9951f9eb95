// Split, RecallDue, Recall and Retain. They work on integers in tables of a few hundred KB, with
// one block to a list (a warp to a row, for RecallDue). Bytes: 4 an entry of a list and 4 to 12 of
// the tables, all in L2. The time is that of three or four dependent loads.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/residency/residency.cuh"
#include "kernels/cuda/residency/residency_recall.cuh"
#include "kernels/cuda/residency/residency_retain.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kMaxThreads = 512;

__global__ void __launch_bounds__(kMaxThreads) SplitKernel(const __grid_constant__ SplitParams p) {
  __shared__ uint32_t totals[32];
  LetNextKernelStart();
  SplitList(p, static_cast<int>(blockIdx.x), totals);
}

__global__ void __launch_bounds__(32) RecallDueKernel(const __grid_constant__ RecallDueParams p) {
  LetNextKernelStart();
  RecallDueRow(p, static_cast<int>(blockIdx.x));
}

__global__ void __launch_bounds__(kMaxThreads)
    RecallKernel(const __grid_constant__ RecallParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  LetNextKernelStart();
  RecallList(p, static_cast<int>(blockIdx.x),
             RecallSharedAt(memory, p.residency.count - p.residency.ring));
}

__global__ void __launch_bounds__(kMaxThreads)
    RetainKernel(const __grid_constant__ RetainParams p, int row_words) {
  __shared__ uint64_t best[32];
  LetNextKernelStart();
  RetainList(p, static_cast<int>(blockIdx.x), row_words, best);
}

}  // namespace

cudaError_t LaunchSplit(const SplitParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.kv_heads < 1 || p.unit_tokens < 1 || !IsResidency(p.residency)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  // Entries that a block looks through: its list; the ring, if that is all; or the table of all
  // units, however many there are.
  const bool all_units = p.whole && p.residency.count > p.residency.ring;
  const int64_t entries = all_units ? kMaxThreads * kListStrip
                          : p.whole ? max(p.selected.capacity, p.residency.count)
                                    : p.selected.capacity;
  return LaunchKernel(SplitKernel, dim3(static_cast<unsigned>(p.rows * p.kv_heads)),
                      dim3(static_cast<unsigned>(ListThreads(entries))), 0, stream, p);
}

cudaError_t LaunchRecallDue(const RecallDueParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.kv_heads < 1 || p.budget_units < 1) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  return LaunchKernel(RecallDueKernel, dim3(static_cast<unsigned>(p.rows)), dim3(32), 0, stream, p);
}

cudaError_t LaunchRecall(const RecallParams& p, cudaStream_t stream) {
  const int places = p.residency.count - p.residency.ring;
  if (p.rows < 0 || p.kv_heads < 1 || !IsResidency(p.residency) || places > kMaxRecallPlaces ||
      (p.unit_tokens != 1 && p.unit_tokens != p.home.block_tokens)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const auto shared = static_cast<size_t>(RecallSharedBytes(places));
  static const cudaError_t roomy =
      cudaFuncSetAttribute(RecallKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(RecallSharedBytes(kMaxRecallPlaces)));
  if (roomy != cudaSuccess) return roomy;
  return LaunchKernel(RecallKernel, dim3(static_cast<unsigned>(p.rows * p.kv_heads)),
                      dim3(static_cast<unsigned>(ListThreads(places))), shared, stream, p);
}

cudaError_t LaunchRetain(const RetainParams& p, cudaStream_t stream) {
  const PagedCache& c = p.resident;
  const int64_t row_bytes = c.head_dim * SizeOf(c.type);
  if (p.rows < 0 || c.kv_heads < 1 || c.block_tokens < 1 || c.ring_blocks != 0 || row_bytes < 16 ||
      row_bytes % 16 != 0 || c.page_bytes % 16 != 0 || !AreAligned(16, c.base) ||
      !IsResidency(p.residency) || p.residency.ring < 1 ||
      (p.unit_tokens != 1 && p.unit_tokens != c.block_tokens)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const int row_words = static_cast<int>(row_bytes / 16);
  const int64_t entries = max(p.residency.count - p.residency.ring, 2 * p.unit_tokens * row_words);
  return LaunchKernel(RetainKernel, dim3(static_cast<unsigned>(p.rows * c.kv_heads)),
                      dim3(static_cast<unsigned>(ListThreads(entries))), 0, stream, p, row_words);
}

}  // namespace sluice::kernels::cuda
