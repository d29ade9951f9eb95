// UpdateResidency: token residency of whole sequences, with one thread block to a sequence and
// another for its stamps. The host takes no part. Tables and lists are integers of a few hundred
// KB in L2.
//
// Free places are the last of those that a sequence has: tables begin so, and UpdateResidency
// gives the first ones first. So two rounds of loads find them, among any number of places, while
// the lists are split. All places are looked at only if the free ones do not suffice.
//
// Bytes of a sequence: its lists (4 in, 4 out an entry), 4 to 12 of the tables an entry, and 8 a
// place if a unit must be evicted: 80 KB for 2,048 selected of 6,600 places. Floor: below a
// microsecond. The time is the latency of three dependent loads, of 2,048 lookups that are a
// sector each on one multiprocessor (1 us; as many stores for the stamps), and, if units are
// evicted, of some 15 barriers of the block and passes over the places.
#include "kernels/cuda/residency/update_residency.cuh"

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"

namespace sluice::kernels::cuda {
namespace {

// Shared memory that a block may have beside its arrays of fixed size.
constexpr int kMaxShared = (227 << 10) - (6 << 10);

// Grid: (rows, 1 or 2). The block of a sequence's first row handles the sequence; a second block
// stamps. Rows that are updated in turn are stamped by the block that handles them.
__global__ void __launch_bounds__(kUpdateThreads)
    UpdateResidencyKernel(const __grid_constant__ UpdateResidencyParams p,
                          const __grid_constant__ UpdateLayout layout) {
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
  while (p.in_turn && slot >= 0 && first + rows < p.rows && p.slots[first + rows] == slot) ++rows;
  const bool stamps = blockIdx.y == 1;
  if (slot >= 0 && p.whole != nullptr && p.whole[slot] != 0) {
    const bool begins = p.in_turn || is_first, ends = p.in_turn || next[0] != slot;
    if (!stamps) return UpdateWhole(p, first, slot, begins, ends);
    WaitForPriorKernels();
    LetNextKernelStart();
    return;
  }
  if (!is_first || slot < 0) {
    WaitForPriorKernels();
    LetNextKernelStart();
    if (slot < 0 && threadIdx.x == 0 && !stamps) {
      p.resident_counts[first] = p.arriving_counts[first] = p.move_counts[first] = 0;
    }
    return;
  }
  if (rows > kMaxQueryPositions && !p.in_turn) __trap();
  const int together = p.in_turn ? 1 : rows;
#pragma unroll 1
  for (int row = first; row < first + rows; row += together) {
    ResidencyUpdate update(p, layout, row, together, gridDim.y == 1, memory);
    update.Prepare();
    if (row == first) {
      WaitForPriorKernels();
      LetNextKernelStart();
    }
    if (stamps) {
      update.Stamp();
    } else {
      update.Run();
    }
    if (p.in_turn) __syncthreads();  // the next row reads the tables and takes the shared memory
  }
}

bool IsAlignedTable(const PagedRows& rows, int dim) {
  return IsTable(rows, dim) &&
         (reinterpret_cast<uintptr_t>(rows.base) | static_cast<uintptr_t>(rows.page_bytes)) %
                 (static_cast<uintptr_t>(dim) * 4) ==
             0;
}

}  // namespace

cudaError_t LaunchUpdateResidency(const UpdateResidencyParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.ahead < 0 || (p.whole != nullptr && (p.forget || p.ahead > kUpdateThreads)) ||
      p.selected.capacity < 1 || p.selected.capacity > UINT16_MAX || p.residency.ring != 0 ||
      (p.in_turn &&
       (p.forget || (p.journal.rows > 0 && p.journal.capacity < p.selected.capacity + p.ahead))) ||
      p.residency.count < 0 || !IsAlignedTable(p.residency.place_of, 1) ||
      !IsAlignedTable(p.residency.places, 2) || p.home.block_tokens < 1 ||
      p.pool.block_tokens < 1) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  const UpdateLayout layout = MakeUpdateLayout(p);
  if (layout.bytes > kMaxShared) return cudaErrorInvalidValue;
  static const cudaError_t roomy = cudaFuncSetAttribute(
      UpdateResidencyKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxShared);
  if (roomy != cudaSuccess) return roomy;
  return LaunchKernel(UpdateResidencyKernel,
                      dim3(static_cast<unsigned>(p.rows), p.forget || p.in_turn ? 1 : 2),
                      dim3(kUpdateThreads), static_cast<size_t>(layout.bytes), stream, p, layout);
}

}  // namespace sluice::kernels::cuda
