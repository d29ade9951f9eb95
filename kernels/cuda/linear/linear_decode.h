// Products of decode rows: bound by the reading of W.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace sluice::kernels::cuda {

// More rows go to LaunchGroupedProduct, with the same slices and so with the same bits.
inline constexpr int32_t kMaxDecodeProductRows = 64;

// y = x W^T (+ bias) (+ y) for all of params.rows as decode rows. REQUIRES: rows <=
// kMaxDecodeProductRows; k a multiple of 8 and >= 64, n of 4; x, W and y 16-byte aligned.
cudaError_t LaunchDecodeProduct(const LinearParams& params, cudaStream_t stream);

// Slices of k, whose sums are added in order. Of n and k alone.
int DecodeProductSlices(int n, int k);

}  // namespace sluice::kernels::cuda
