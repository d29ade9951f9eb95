// Reorders weights in place from kFp8Blocks to kFp8Pairs. It moves 2 bytes a weight. Floor: those
// bytes over the memory's rate, 10 ms for 20 GiB on an H200.
#include <algorithm>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 132 * 16;

__global__ void __launch_bounds__(kThreads) PairWeights(uint4* __restrict__ w, int64_t count) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    const uint4 v = w[i];
    w[i] = {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
            __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632)};
  }
}

}  // namespace

cudaError_t LaunchPairWeights(int64_t count, uint8_t* weights, cudaStream_t stream) {
  if (count < 0 || count % 16 != 0 || reinterpret_cast<uintptr_t>(weights) % 16 != 0) {
    return cudaErrorInvalidValue;
  }
  if (count == 0) return cudaSuccess;
  const auto grid =
      static_cast<unsigned>(std::min((count / 16 + kThreads - 1) / kThreads, kMaxBlocks));
  return LaunchKernel(PairWeights, dim3(grid), dim3(kThreads), 0, stream,
                      reinterpret_cast<uint4*>(weights), count / 16);
}

}  // namespace sluice::kernels::cuda
