// LaunchLinear: it chooses the kernel that computes each kind of rows.
#include <cstdint>

#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/linear/grouped_product.h"
#include "kernels/cuda/linear/linear_decode.h"
#include "kernels/cuda/linear/linear_prompt.h"
#include "kernels/fp8_pairs.h"

namespace sluice::kernels::cuda {
namespace {

// Returns the product of all rows as one group.
GroupedProduct GroupOf(const LinearParams& p) {
  return {.x = static_cast<const uint16_t*>(p.x),
          .x_stride = p.w.k,
          .x_group_stride = 0,
          .w = p.w,
          .groups = 1,
          .n = p.w.n,
          .bias = p.bias,
          .y = p.y,
          .y_stride = p.w.n,
          .y_group_stride = 0,
          .y_type = DType::kFloat32,
          .accumulate = p.accumulate,
          .rows = p.rows,
          .pairs = nullptr,
          .begins = nullptr,
          .pairs_per_row = 1};
}

bool IsAligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Returns true if the rows of W and x can be copied as tiles, and those of y written 16 bytes at
// a time. If it is true for the first row of a buffer, it is true for every row.
bool IsTiled(const LinearParams& p) {
  return p.w.k % 8 == 0 && p.w.k >= 64 && p.w.n % 4 == 0 && IsAligned(p.w.data) && IsAligned(p.x) &&
         IsAligned(p.y);
}

LinearParams RowsOf(const LinearParams& p, int32_t first, int32_t rows) {
  LinearParams some = p;
  some.x = static_cast<const uint16_t*>(p.x) + int64_t{first} * p.w.k;
  some.y = p.y + int64_t{first} * p.w.n;
  some.rows = rows;
  some.decode_rows = 0;
  return some;
}

}  // namespace

cudaError_t LaunchLinear(const LinearParams& p, cudaStream_t stream) {
  if (p.w.n <= 0 || p.w.k <= 0 || p.rows < 0 || p.decode_rows < 0 || p.decode_rows > p.rows ||
      p.x_type != DType::kBFloat16) {
    return cudaErrorInvalidValue;
  }
  if (p.rows == 0) return cudaSuccess;
  // These layouts have one kernel for decode rows and prompt rows.
  if (p.w.layout == WeightLayout::kFp8Blocks || p.w.layout == kFp8Pairs)
    return LaunchGroupedProduct(GroupOf(p), stream);
  if (p.w.layout != WeightLayout::kRowMajor) return cudaErrorInvalidValue;
  if (!IsTiled(p)) return LaunchPlainProduct(GroupOf(p), stream);
  if (p.decode_rows > 0) {
    const LinearParams decode = RowsOf(p, 0, p.decode_rows);
    cudaError_t error = cudaSuccess;
    if (decode.rows <= kMaxDecodeProductRows) {
      error = LaunchDecodeProduct(decode, stream);
    } else {
      GroupedProduct group = GroupOf(decode);
      group.slices = DecodeProductSlices(p.w.n, p.w.k);
      error = LaunchGroupedProduct(group, stream);
    }
    if (error != cudaSuccess) return error;
  }
  if (p.decode_rows == p.rows) return cudaSuccess;
  return LaunchPromptProduct(RowsOf(p, p.decode_rows, p.rows - p.decode_rows), stream);
}

}  // namespace sluice::kernels::cuda
