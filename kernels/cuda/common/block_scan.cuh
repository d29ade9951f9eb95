// A prefix sum over the threads of a block, in thread order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sluice::kernels::cuda {

struct BlockSum {
  uint32_t before;  // sum over the threads before this one
  uint32_t total;
};

// Returns the prefix sum and the total of `value` over a block of whole warps. `totals` is shared
// memory with a word for each of 32 warps. All threads must call it together. It may be called
// again at once.
__device__ __forceinline__ BlockSum ScanBlock(uint32_t value, uint32_t* totals) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = value;
#pragma unroll
  for (unsigned step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAll, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) totals[warp] = sum;
  __syncthreads();
  const uint32_t of_warp = lane < blockDim.x / 32 ? totals[lane] : 0;
  const BlockSum result = {
      sum - value + __reduce_add_sync(kAll, lane < warp ? of_warp : 0),
      __reduce_add_sync(kAll, of_warp),
  };
  __syncthreads();
  return result;
}

}  // namespace sluice::kernels::cuda
