// Latent attention over lists of entries: chooses the kernel that takes a call.
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/mla/mla_internal.h"

namespace sluice::kernels::cuda {
namespace {

bool IsValid(const SparseMlaParams& p) {
  const PagedLatents& c = p.cache;
  const bool packed = c.type == DType::kFloat8E4M3;
  return p.rows >= 0 && p.heads > 0 && p.capacity >= 0 && c.rank > 0 && c.rope >= 0 &&
         c.rank <= kMaxMlaRank && c.rank + c.rope <= kMaxMlaWidth && c.block_tokens > 0 &&
         (!packed || (c.rank == kPackedRank && c.rope == kPackedRope)) &&
         p.q_type != DType::kFloat8E4M3 && p.out_type != DType::kFloat8E4M3 &&
         p.spare_processors >= 0 && (p.other_o == nullptr) == (p.other_lse == nullptr) &&
         (p.then_counts == nullptr) == (p.then_entries == nullptr) &&
         (p.then_counts == nullptr || p.other_o != nullptr);
}

}  // namespace

cudaError_t LaunchSparseMla(const SparseMlaParams& p, cudaStream_t stream) {
  if (!IsValid(p)) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  if (HasPackedKernel(p)) return LaunchPackedSparseMla(p, stream);
  if (p.then_counts == nullptr) return LaunchPlainSparseMla(p, stream);
  const cudaError_t error = LaunchSparseMla(FirstOfTwo(p), stream);
  return error != cudaSuccess ? error : LaunchSparseMla(SecondOfTwo(p), stream);
}

}  // namespace sluice::kernels::cuda
