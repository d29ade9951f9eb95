// TopK by the length of the lists.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/sparse_params.h"

namespace sluice::kernels::cuda {

// Takes lists of any length, with a cluster of thread blocks to a list.
cudaError_t LaunchLongTopK(const TopKParams& params, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
