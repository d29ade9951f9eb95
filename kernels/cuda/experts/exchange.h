// Launches of the operators of kernels/exchange_params.h. Each returns cudaErrorInvalidValue for
// sizes that it does not take: `dim` is a multiple of 4, rows are bf16, and arrays begin at
// multiples of 16 bytes.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/exchange_params.h"
#include "kernels/latent_params.h"

namespace sluice::kernels::cuda {

// Launches two kernels, as LaunchUnpackRows does.
cudaError_t LaunchPackRows(const PackRowsParams& params, cudaStream_t stream);
cudaError_t LaunchUnpackRows(const UnpackRowsParams& params, cudaStream_t stream);
cudaError_t LaunchAddParts(const AddPartsParams& params, cudaStream_t stream);

// Launches the second part of LaunchRoute: lists the pairs of each expert.
cudaError_t LaunchRoutePairs(const RouteParams& params, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
