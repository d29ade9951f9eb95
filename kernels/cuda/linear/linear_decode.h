// Products of decode rows, which are bound by the reading of W.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace sluice::kernels::cuda {

// More rows go to LaunchGroupedProduct, with the same slices and so with the same bits.
inline constexpr int32_t kMaxDecodeProductRows = 64;

// Computes y = x W^T (+ bias) (+ y) for all of params.rows as decode rows. REQUIRES: rows <=
// kMaxDecodeProductRows; k is a multiple of 8 and >= 64, n a multiple of 4; x, W and y are
// 16-byte aligned.
cudaError_t LaunchDecodeProduct(const LinearParams& params, cudaStream_t stream);

// Returns the number of slices of k, whose sums are added in order. It depends on n and k alone.
int DecodeProductSlices(int n, int k);

}  // namespace sluice::kernels::cuda
