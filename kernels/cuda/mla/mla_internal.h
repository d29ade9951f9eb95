// The parts of LaunchSparseMla (sparse_mla.cu). Shapes are validated.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/latent_params.h"

namespace sluice::kernels::cuda {

// Limits of the plain kernel: a warp holds a head's result in registers.
inline constexpr int32_t kMaxMlaRank = 1024;
inline constexpr int32_t kMaxMlaWidth = 1152;  // rank + rope

// All rows, any shape that LaunchSparseMla takes.
cudaError_t LaunchPlainSparseMla(const SparseMlaParams& p, cudaStream_t stream);

// Whether the tensor-core kernel takes such calls: packed entries, bf16 queries, a multiple of 64
// heads. The choice depends on the model and on how buffers are aligned.
inline constexpr int32_t kMaxPackedHeads = 1024;
bool HasPackedKernel(const SparseMlaParams& p);

// All rows. REQUIRES: HasPackedKernel(p). cudaErrorInvalidValue: lists of more than one piece, and
// no scratch for their totals.
cudaError_t LaunchPackedSparseMla(const SparseMlaParams& p, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
