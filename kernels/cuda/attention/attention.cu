// Chooses the kernel that computes each kind of attention rows.
#include "kernels/cuda/attention/attention_internal.h"
#include "kernels/cuda/common/launch.h"

namespace sluice::kernels::cuda {
namespace {

static_assert(kMaxNewTokens <= kBlockTokensStep, "see DecodeKernel: what it reads without a wait");

bool IsValid(const AttentionParams& p) {
  const PagedCache& c = p.cache;
  return p.rows >= 0 && p.decode_rows >= 0 && p.decode_rows <= p.rows && c.kv_heads > 0 &&
         p.heads > 0 && p.heads % c.kv_heads == 0 && c.head_dim > 0 && c.head_dim <= 256 &&
         c.head_dim % 16 == 0 && c.block_tokens > 0 && c.block_tokens % kBlockTokensStep == 0;
}

// Returns true for shapes that the tensor-core kernels compute; the plain kernel takes the rest.
// The choice depends on the model alone, so that a row's bits do not depend on its batch.
bool HasFastKernels(const AttentionParams& p) {
  const PagedCache& c = p.cache;
  return c.type == DType::kBFloat16 && HasFastShape(p.heads / c.kv_heads, c.head_dim);
}

AttentionParams RowsFrom(const AttentionParams& p, int32_t first, int32_t rows) {
  AttentionParams some = p;
  const int64_t width = int64_t{p.heads} * p.cache.head_dim;
  some.q = p.q + first * p.q_stride;
  some.slots = p.slots + first;
  some.positions = p.positions + first;
  some.out = static_cast<char*>(p.out) + first * width * SizeOf(p.out_type);
  some.lse = p.lse == nullptr ? nullptr : p.lse + int64_t{first} * p.heads;
  some.rows = rows;
  return some;
}

}  // namespace

cudaError_t LaunchAttention(const AttentionParams& p, cudaStream_t stream) {
  if (!IsValid(p)) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  if (!HasFastKernels(p)) return LaunchPlainAttention(p, stream);
  cudaError_t error = cudaSuccess;
  if (p.decode_rows > 0) error = LaunchDecodeAttention(RowsFrom(p, 0, p.decode_rows), stream);
  if (error == cudaSuccess && p.rows > p.decode_rows) {
    error = LaunchPrefillAttention(RowsFrom(p, p.decode_rows, p.rows - p.decode_rows), stream);
  }
  return error;
}

}  // namespace sluice::kernels::cuda
