// Products of prompt rows, which are bound by arithmetic and left to cuBLASLt.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace sluice::kernels::cuda {

// Computes y = x W^T (+ bias) (+ y) for all of params.rows as prompt rows. The library is loaded
// at the first call. If it is missing, returns cudaErrorSharedObjectInitFailed and names it in
// one line on stderr. REQUIRES: k is a multiple of 8 and >= 64, n a multiple of 4; x, W and y are
// 16-byte aligned.
cudaError_t LaunchPromptProduct(const LinearParams& params, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
