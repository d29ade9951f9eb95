#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace sluice::kernels::cuda {

// kFp8Blocks to kFp8Pairs (kernels/fp8_pairs.h), in place: `count` weights, whole rows whose k is a
// multiple of 16. cudaErrorInvalidValue: `weights` is no multiple of 16, or `count`.
cudaError_t LaunchPairWeights(int64_t count, uint8_t* weights, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
