// Admit: token residency of whole sequences, one thread block to a sequence, nothing of it on the
// host. Tables and lists are integers of a few hundred KB in L2.
//
// Bytes of a sequence: its lists (4 in, 4 out an entry), 4 to 12 of the tables an entry, 8 a place:
// 80 KB for 2,048 selected of 6,600 places. Floor: below a microsecond; what it takes is latency,
// of four dependent loads and of some 25 meetings of the block where something must be put out.
#include "kernels/cuda/admit.cuh"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch.h"

namespace sluice::kernels::cuda {
namespace {

// What a block may have beside its arrays of fixed size.
constexpr int kMaxShared = (227 << 10) - (6 << 10);

// Grid: rows. The block of a sequence's first row has the sequence.
__global__ void __launch_bounds__(kAdmitThreads)
    AdmitKernel(const __grid_constant__ AdmitParams p, const __grid_constant__ AdmitLayout layout) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int first = static_cast<int>(blockIdx.x);
  const int slot = p.slots[first];
  const bool is_first = slot < 0 || first == 0 || p.slots[first - 1] != slot;
  int next[kMaxQueryPositions];  // slots of the rows behind
#pragma unroll
  for (int i = 0; i < kMaxQueryPositions; ++i) {
    next[i] = first + 1 + i < p.rows ? p.slots[first + 1 + i] : -1;
  }
  int rows = 1;
#pragma unroll
  for (int i = 0; i < kMaxQueryPositions; ++i) {
    if (slot >= 0 && rows == i + 1 && next[i] == slot) ++rows;
  }
  if (!is_first) {
    WaitForPriorKernels();
    LetNextKernelStart();
    return;
  }
  if (rows > kMaxQueryPositions) __trap();
  if (slot < 0) {
    WaitForPriorKernels();
    LetNextKernelStart();
    if (threadIdx.x == 0) {
      p.resident_counts[first] = p.arriving_counts[first] = p.move_counts[first] = 0;
    }
    return;
  }
  Admission admission(p, layout, first, rows, memory);
  admission.Prepare();
  WaitForPriorKernels();
  LetNextKernelStart();
  admission.Run();
}

bool IsTable(const PagedRows& rows, int dim) {
  return rows.dim == dim && rows.rows_per_page >= 1 && rows.type == DType::kFloat32 &&
         (reinterpret_cast<uintptr_t>(rows.base) | static_cast<uintptr_t>(rows.page_bytes)) %
                 (static_cast<uintptr_t>(dim) * 4) ==
             0;
}

}  // namespace

cudaError_t LaunchAdmit(const AdmitParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.ahead < 0 || p.selected.capacity < 1 || p.selected.capacity > UINT16_MAX ||
      p.residency.ring != 0 || p.residency.count < 0 || !IsTable(p.residency.place_of, 1) ||
      !IsTable(p.residency.places, 2) || p.home.block_tokens < 1 || p.pool.block_tokens < 1) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const AdmitLayout layout = MakeAdmitLayout(p);
  if (layout.bytes > kMaxShared) return cudaErrorInvalidValue;
  static const cudaError_t roomy =
      cudaFuncSetAttribute(AdmitKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
  if (roomy != cudaSuccess) return roomy;
  return LaunchKernel(AdmitKernel, dim3(static_cast<unsigned>(p.rows)), dim3(kAdmitThreads),
                      static_cast<size_t>(layout.bytes), stream, p, layout);
}

}  // namespace sluice::kernels::cuda
