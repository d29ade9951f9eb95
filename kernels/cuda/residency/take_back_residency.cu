// TakeBackResidency: one thread block undoes a sequence's last rows, one after the other. It runs
// before a step whose sequences had drafts refuted, and reads 12 bytes for each place that a row
// changed. The time is that of some dependent loads for each row.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/residency/update_residency.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kTakeBackThreads = 512;

// All threads call it. A place occurs once in a row's list.
__device__ void TakeBackRow(const TakeBackResidencyParams& p, int slot, int64_t list) {
  const ResidencyJournal& journal = p.journal;
  const int64_t begin = list * journal.capacity;
  const int count = journal.counts[list];
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kTakeBackThreads) {
    const int64_t at = begin + i;
    const int place = journal.places[at], unit = journal.units[at];
    int32_t* const row = RowAt<int32_t>(p.residency.places, slot, place, 0);
    const int now = row[0];
    const bool moves = now != unit && unit >= 0;
    // A unit that loses its place had none before the row, so no other thread gives it one.
    if (now != unit && now >= 0) *RowAt<int32_t>(p.residency.place_of, slot, now, 0) = -1;
    row[0] = unit;
    row[1] = journal.stamps[at];
    if (moves) *RowAt<int32_t>(p.residency.place_of, slot, unit, 0) = place;
    journal.units[at] = moves ? EntryNumber(p.home, slot, unit) : -1;
    journal.places[at] = moves ? EntryNumber(p.pool, slot, place) : -1;
  }
  if (threadIdx.x == 0) p.move_counts[list] = count;
}

// Grid: (slots).
__global__ void __launch_bounds__(kTakeBackThreads)
    TakeBackKernel(const __grid_constant__ TakeBackResidencyParams p) {
  WaitForPriorKernels();
  LetNextKernelStart();
  const int slot = static_cast<int>(blockIdx.x), rows = p.rows[slot];
  const int64_t lists = int64_t{slot} * p.journal.rows;
  for (int i = static_cast<int>(threadIdx.x); i < p.journal.rows; i += kTakeBackThreads) {
    p.move_counts[lists + i] = 0;
  }
  for (int undone = 0; undone < rows; ++undone) {
    __syncthreads();  // the row behind is undone
    TakeBackRow(p, slot, lists + (p.last[slot] - undone) % p.journal.rows);
  }
}

}  // namespace

cudaError_t LaunchTakeBackResidency(const TakeBackResidencyParams& p, cudaStream_t stream) {
  if (p.slots < 0 || p.journal.rows < 1 || p.residency.ring != 0 ||
      !IsTable(p.residency.place_of, 1) || !IsTable(p.residency.places, 2) ||
      p.home.block_tokens < 1 || p.pool.block_tokens < 1) {
    return cudaErrorInvalidValue;
  }
  if (p.slots == 0) return cudaSuccess;
  return LaunchKernel(TakeBackKernel, dim3(static_cast<unsigned>(p.slots)), dim3(kTakeBackThreads),
                      0, stream, p);
}

}  // namespace sluice::kernels::cuda
