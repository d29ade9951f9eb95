// Products of prompt rows: bound by arithmetic, and left to cuBLASLt.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace sluice::kernels::cuda {

// y = x W^T (+ bias) (+ y) for all of params.rows as prompt rows. The library is loaded at the
// first call; without it: cudaErrorSharedObjectInitFailed, and one line on stderr that names it.
// REQUIRES: k a multiple of 8 and >= 64, n of 4; x, W and y 16-byte aligned.
cudaError_t LaunchPromptProduct(const LinearParams& params, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
