// The parts of LaunchAttention (attention.cu), each over some of the rows, of LaunchSparseAttention
// (sparse_attention.cu) and of LaunchPullAttention (pull_attention.cu). The caller has validated
// the shapes.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"
#include "kernels/pull_params.h"
#include "kernels/sparse_params.h"

namespace sluice::kernels::cuda {

// Returns true if the tensor-core kernels take bf16 caches of that shape.
constexpr bool HasFastShape(int32_t group, int32_t head_dim) {
  return (head_dim == 64 || head_dim == 128) && group <= 16;
}

// Computes all of p's rows as decode rows. REQUIRES: a bf16 cache and HasFastShape().
cudaError_t LaunchDecodeAttention(const AttentionParams& p, cudaStream_t stream);

// Computes all of p's rows as prompt rows. REQUIRES: as above.
cudaError_t LaunchPrefillAttention(const AttentionParams& p, cudaStream_t stream);

// Computes all of p's rows, in any shape that LaunchAttention takes.
cudaError_t LaunchPlainAttention(const AttentionParams& p, cudaStream_t stream);

// Computes all of p's lists, in any shape that LaunchSparseAttention takes.
cudaError_t LaunchPlainSparseAttention(const SparseAttentionParams& p, cudaStream_t stream);

// Does PullAttention in any shape that LaunchPullAttention takes.
cudaError_t LaunchPlainPullAttention(const PullAttentionParams& p, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
