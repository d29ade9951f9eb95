// Attention of rows over lists of units: which kernel computes it.
#include "kernels/cuda/attention_internal.h"
#include "kernels/cuda/launch.h"

namespace sluice::kernels::cuda {
namespace {

bool IsValid(const SparseAttentionParams& p) {
  const PagedCache& c = p.cache;
  return p.rows >= 0 && c.kv_heads > 0 && p.heads > 0 && p.heads % c.kv_heads == 0 &&
         c.head_dim > 0 && c.head_dim <= 256 && c.head_dim % 16 == 0 && c.block_tokens > 0 &&
         c.block_tokens % kBlockTokensStep == 0 && p.unit_tokens > 0 && p.capacity >= 0 &&
         0 <= p.kv_head_begin && p.kv_head_begin <= p.kv_head_end && p.kv_head_end <= c.kv_heads;
}

}  // namespace

cudaError_t LaunchSparseAttention(const SparseAttentionParams& p, cudaStream_t stream) {
  if (!IsValid(p)) return cudaErrorInvalidValue;
  if (p.rows == 0 || p.kv_head_begin == p.kv_head_end) return cudaSuccess;
  return LaunchPlainSparseAttention(p, stream);
}

}  // namespace sluice::kernels::cuda
