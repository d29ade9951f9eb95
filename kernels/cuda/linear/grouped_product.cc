#include "kernels/cuda/linear/grouped_product.h"

#include "kernels/cuda/common/launch.h"
#include "kernels/fp8_pairs.h"

namespace sluice::kernels::cuda {
namespace {

bool IsAligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace

bool TakesTiles(const GroupedProduct& p) {
  if (p.w.layout == WeightLayout::kFp8Blocks) return false;
  const bool is_fp8 = p.w.layout == kFp8Pairs;
  const int depth = is_fp8 ? 128 : 64;        // elements of a tile's row
  const int piece = is_fp8 ? 16 : 8;          // elements in 16 bytes of a row of W
  const int y_piece = p.groups > 1 ? 16 : 4;  // a warp's features share one block of scales
  return p.w.k % piece == 0 && p.w.k >= depth && p.n % y_piece == 0 && p.x_stride % 8 == 0 &&
         p.x_group_stride % 8 == 0 && p.y_stride % 4 == 0 && p.y_group_stride % 4 == 0 &&
         IsAligned(p.w.data) && IsAligned(p.x) && IsAligned(p.y);
}

cudaError_t LaunchGroupedProduct(const GroupedProduct& p, cudaStream_t stream) {
  const bool is_pairs = p.w.layout == kFp8Pairs;
  const bool is_fp8 = is_pairs || p.w.layout == WeightLayout::kFp8Blocks;
  const bool is_bf16_out = p.y_type == DType::kBFloat16;
  if (p.n <= 0 || p.w.k <= 0 || p.groups <= 0 || p.rows < 0 || p.pairs_per_row <= 0 ||
      int64_t{p.groups} * p.n != p.w.n || (p.pairs == nullptr) != (p.begins == nullptr) ||
      (!is_fp8 && p.w.layout != WeightLayout::kRowMajor) || (is_fp8 && p.w.scales == nullptr) ||
      (is_pairs && !HasFp8Pairs(p.w.k)) || (!is_bf16_out && p.y_type != DType::kFloat32) ||
      (is_bf16_out && p.accumulate)) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  if (!TakesTiles(p)) return LaunchPlainProduct(p, stream);
  return is_fp8 ? LaunchTiledProductFp8(p, stream) : LaunchTiledProductBf16(p, stream);
}

cudaError_t LaunchHeadLinear(const HeadLinearParams& p, cudaStream_t stream) {
  if (p.x_type != DType::kBFloat16) return cudaErrorInvalidValue;
  return LaunchGroupedProduct({.x = static_cast<const uint16_t*>(p.x),
                               .x_stride = p.x_stride,
                               .x_group_stride = p.x_head_stride,
                               .w = p.w,
                               .groups = p.heads,
                               .n = p.n,
                               .bias = nullptr,
                               .y = p.y,
                               .y_stride = p.y_stride,
                               .y_group_stride = p.y_head_stride,
                               .y_type = p.y_type,
                               .accumulate = false,
                               .rows = p.rows,
                               .pairs = nullptr,
                               .begins = nullptr,
                               .pairs_per_row = 1},
                              stream);
}

cudaError_t LaunchExpertLinear(const ExpertLinearParams& p, cudaStream_t stream) {
  if (p.x_type != DType::kBFloat16) return cudaErrorInvalidValue;
  return LaunchGroupedProduct({.x = static_cast<const uint16_t*>(p.x),
                               .x_stride = p.w.k,
                               .x_group_stride = 0,
                               .w = p.w,
                               .groups = p.experts,
                               .n = p.n,
                               .bias = nullptr,
                               .y = p.y,
                               .y_stride = p.n,
                               .y_group_stride = 0,
                               .y_type = DType::kFloat32,
                               .accumulate = false,
                               .rows = p.max_pairs,
                               .pairs = p.pairs,
                               .begins = p.begins,
                               .pairs_per_row = p.pairs_per_row},
                              stream);
}

}  // namespace sluice::kernels::cuda
