// Products of decode rows: bound by the reading of W.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace sluice::kernels::cuda {

// y = x W^T (+ bias) (+ y) for all of params.rows as decode rows. REQUIRES: k a multiple of 8 and
// >= 64, n of 4; x, W and y 16-byte aligned.
cudaError_t LaunchDecodeProduct(const LinearParams& params, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
