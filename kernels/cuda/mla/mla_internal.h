// The parts of LaunchSparseMla (sparse_mla.cu). The caller has validated the shapes.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/latent_params.h"

namespace sluice::kernels::cuda {

// Limits of the plain kernel, whose warps hold a head's result in registers.
inline constexpr int32_t kMaxMlaRank = 1024;
inline constexpr int32_t kMaxMlaWidth = 1152;  // rank + rope

// Computes all rows, in any shape that LaunchSparseMla takes.
cudaError_t LaunchPlainSparseMla(const SparseMlaParams& p, cudaStream_t stream);

// Returns true if the tensor-core kernel takes the call: packed entries, bf16 queries, a multiple
// of 64 heads. The choice depends on the model and on how buffers are aligned.
inline constexpr int32_t kMaxPackedHeads = 1024;
bool HasPackedKernel(const SparseMlaParams& p);

// Computes all rows. REQUIRES: HasPackedKernel(p). Returns cudaErrorInvalidValue if lists have
// more than one piece and there is no scratch for their totals.
cudaError_t LaunchPackedSparseMla(const SparseMlaParams& p, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
