// The operators of speculation on the device: they settle which drafts were accepted, and list the
// newest tokens of sequences. Both move a few KiB, so a launch is their floor.
#include <cstdint>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 128;

__device__ void ClearRow(const SettleDraftsParams& p, int row) {
  p.draft_slots[row] = p.draft_rows[row] = -1;
  for (int d = 0; d < p.drafts; ++d) p.out_drafts[int64_t{d} * p.rows + row] = kNoDraft;
  for (int d = 0; d <= p.drafts; ++d) {
    p.draft_positions[int64_t{d} * p.rows + row] = p.slots[row] < 0 ? 0 : p.positions[row] + d;
  }
}

// The thread of a sequence's first row settles all of its rows, so that no thread waits for
// another.
__global__ void __launch_bounds__(kThreads)
    SettleDraftsKernel(const __grid_constant__ SettleDraftsParams p) {
  WaitForPriorKernels();
  LetNextKernelStart();
  const int first = blockIdx.x * kThreads + threadIdx.x;
  if (first >= p.rows) return;
  const int slot = p.slots[first];
  if (slot < 0) return ClearRow(p, first);
  if (first > 0 && p.slots[first - 1] == slot) return;
  int32_t* const history = p.tokens + slot * p.token_stride;
  int last = first;
  bool accepted = true;
  for (int row = first;; ++row) {
    ClearRow(p, row);
    if (row + 1 >= p.rows || p.slots[row + 1] != slot) break;
    accepted = accepted && p.chosen[row] == history[p.positions[row] + 1];
    if (accepted) last = row + 1;
  }
  const int64_t next = int64_t{p.positions[last]} + 1;
  if (p.chosen[last] < 0 || next >= p.token_stride) return;
  history[next] = p.chosen[last];
  if (next + p.drafts >= p.token_stride) return;
  p.draft_slots[last] = slot;
  p.draft_rows[last] = p.step_rows[last];
}

__global__ void __launch_bounds__(kThreads)
    NewestListsKernel(const __grid_constant__ NewestListsParams p) {
  WaitForPriorKernels();
  LetNextKernelStart();
  const int row = blockIdx.x;
  const int slot = p.slots[row], position = p.positions[row];
  const int first = slot < 0 ? 0 : max(p.begins[slot], position + 1 - p.lists.capacity);
  const int count = slot < 0 ? 0 : max(position + 1 - first, 0);
  int32_t* const units = p.lists.units + int64_t{row} * p.lists.capacity;
  for (int i = threadIdx.x; i < count; i += kThreads) units[i] = first + i;
  if (threadIdx.x == 0) p.lists.counts[row] = count;
}

}  // namespace

cudaError_t LaunchSettleDrafts(const SettleDraftsParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.drafts < 0 || p.drafts > kMaxDeviceDrafts) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  const dim3 grid((p.rows + kThreads - 1) / kThreads);
  return LaunchKernel(SettleDraftsKernel, grid, dim3(kThreads), 0, stream, p);
}

cudaError_t LaunchNewestLists(const NewestListsParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.lists.capacity < 1) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  return LaunchKernel(NewestListsKernel, dim3(p.rows), dim3(kThreads), 0, stream, p);
}

}  // namespace sluice::kernels::cuda
