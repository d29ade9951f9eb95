// The parts of LaunchAttention (attention.cu), each over some of the rows, and of
// LaunchSparseAttention (sparse_attention.cu). Shapes are validated.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"
#include "kernels/sparse_params.h"

namespace sluice::kernels::cuda {

// Whether the tensor-core kernels take bf16 caches of such a shape.
constexpr bool HasFastShape(int32_t group, int32_t head_dim) {
  return (head_dim == 64 || head_dim == 128) && group <= 16;
}

// All of p's rows as decode rows. bf16 caches and HasFastShape only.
cudaError_t LaunchDecodeAttention(const AttentionParams& p, cudaStream_t stream);

// All of p's rows as prompt rows; same shapes.
cudaError_t LaunchPrefillAttention(const AttentionParams& p, cudaStream_t stream);

// All of p's rows, any shape that LaunchAttention takes.
cudaError_t LaunchPlainAttention(const AttentionParams& p, cudaStream_t stream);

// All of p's lists, any shape that LaunchSparseAttention takes.
cudaError_t LaunchPlainSparseAttention(const SparseAttentionParams& p, cudaStream_t stream);

}  // namespace sluice::kernels::cuda
