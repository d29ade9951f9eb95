// The launches of AnchorStatistics: three kernels for each row, one row after the other, because
// rows share the scratch.
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/fluxion/anchor_combine.cuh"
#include "kernels/cuda/fluxion/anchor_split.cuh"
#include "kernels/cuda/fluxion/anchor_walk.cuh"

namespace sluice::kernels::cuda {
namespace {

bool IsValid(const AnchorStatisticsParams& p) {
  const PagedCache& c = p.cache;
  if (c.kv_heads <= 0 || p.heads <= 0 || p.heads % c.kv_heads != 0) return false;
  if (p.heads / c.kv_heads > kAnchorMaxGroup || p.rows < 0) return false;
  if (c.head_dim <= 0 || c.head_dim % 16 != 0 || c.head_dim > kAnchorMaxDim) return false;
  if (c.block_tokens <= 0 || c.block_tokens % kAnchorUnitTokens != 0) return false;
  if (c.ring_blocks != 0 || c.head_tables != nullptr || !HasAlignedKeys(c)) return false;
  if (!AreDigests(p.digests, c.head_dim)) return false;
  return (c.type == DType::kFloat32 || c.type == DType::kBFloat16) && AreAligned(8, p.scratch);
}

// The longest row is not known here, only how long a sequence may be: blocks of splits that a row
// does not have end at once.
template <typename T>
cudaError_t Launch(const AnchorStatisticsParams& p, cudaStream_t stream) {
  const int group = p.heads / p.cache.kv_heads;
  const size_t shared = SplitSharedBytes(group, p.cache.head_dim);
  static const cudaError_t roomy =
      cudaFuncSetAttribute(AnchorSplitKernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(SplitSharedBytes(kAnchorMaxGroup, kAnchorMaxDim)));
  if (roomy != cudaSuccess) return roomy;
  const int64_t splits = p.cache.table_stride * p.cache.block_tokens / kAnchorSplitTokens + 1;
  const dim3 of_splits(static_cast<unsigned>(splits), static_cast<unsigned>(p.cache.kv_heads));
  const dim3 of_heads(static_cast<unsigned>(p.heads + p.cache.kv_heads));
  const dim3 of_levels(static_cast<unsigned>(p.heads), kFluxionLevels);
  for (int row = 0; row < p.rows; ++row) {
    cudaError_t error =
        LaunchKernel(AnchorSplitKernel<T>, of_splits, kSplitThreads, shared, stream, p, row);
    if (error != cudaSuccess) return error;
    error = LaunchKernel(AnchorCombineKernel, of_heads, kCombineThreads, 0, stream, p, row);
    if (error != cudaSuccess) return error;
    error = LaunchKernel(AnchorWalkKernel, of_levels, kWalkThreads, 0, stream, p, row);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t LaunchAnchorStatistics(const AnchorStatisticsParams& p, cudaStream_t stream) {
  if (!IsValid(p)) return cudaErrorInvalidValue;
  return p.cache.type == DType::kFloat32 ? Launch<float>(p, stream)
                                         : Launch<__nv_bfloat16>(p, stream);
}

}  // namespace sluice::kernels::cuda
