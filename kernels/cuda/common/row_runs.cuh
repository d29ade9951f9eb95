// Neighbouring rows of one sequence whose positions rise by one, as those of a sequence's drafts
// do. Kernels that read a sequence's cache take them together, as a bundle of a few rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sluice::kernels::cuda {

// Returns whether row r < rows goes on where the row before it ends.
__device__ __forceinline__ bool ContinuesRow(const int32_t* slots, const int32_t* positions,
                                             int r) {
  return r > 0 && slots[r] >= 0 && slots[r] == slots[r - 1] && positions[r] == positions[r - 1] + 1;
}

// Returns the rows of the bundle that begins with row r < rows: at most `most`. 0: the row is
// padded, or belongs to an earlier row's bundle.
__device__ inline int RowsOfBundle(const int32_t* slots, const int32_t* positions, int rows, int r,
                                   int most) {
  if (slots[r] < 0) return 0;
  int before = 0, count = 1;
  while (ContinuesRow(slots, positions, r - before)) ++before;
  if (before % most != 0) return 0;
  while (count < most && r + count < rows && ContinuesRow(slots, positions, r + count)) ++count;
  return count;
}

}  // namespace sluice::kernels::cuda
