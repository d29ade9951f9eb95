// Visit: a word of each stretch of the rows' homes, over the link, so that the GPU has translated
// their addresses when a transfer comes to them.
//
// Bytes: 32 for each stretch; 11 stretches of 2 MiB for a layer of 32,768 entries of 656 bytes.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 64;

// A block a row.
__global__ void __launch_bounds__(kThreads) VisitKernel(const __grid_constant__ VisitParams p) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const int slot = p.slots[blockIdx.x];
  if (slot < 0) return;
  const int32_t pages = p.positions[blockIdx.x] / p.cache.block_tokens + 1;
  const int32_t* const table = p.cache.block_table + slot * p.cache.table_stride;
  for (int32_t page = static_cast<int32_t>(threadIdx.x) * p.step_pages; page < pages;
       page += kThreads * p.step_pages) {
    const char* const at =
        static_cast<const char*>(p.cache.base) + table[page] * p.cache.page_bytes;
    uint32_t word;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(word) : "l"(at));
  }
}

}  // namespace

cudaError_t LaunchVisit(const VisitParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.step_pages < 1 || p.cache.block_tokens < 1) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  return LaunchKernel(VisitKernel, dim3(static_cast<unsigned>(p.rows)), dim3(kThreads), 0, stream,
                      p);
}

}  // namespace sluice::kernels::cuda
