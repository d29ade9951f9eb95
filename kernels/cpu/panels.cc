#include <cstring>

#include "kernels/scalar.h"

namespace sluice::kernels {

void PackPanels(const uint16_t* w, int32_t n, int32_t k, int32_t first_row, uint16_t* out) {
  const WeightMatrix shape = {out, first_row + n, k, WeightLayout::kPanel16};
  // The rows of one panel are taken at a time, so that `out` is written front to back.
  for (int64_t row = 0; row < n;) {
    const int64_t column = (first_row + row) % kPanelColumns;
    const int64_t count = Min(kPanelColumns - column, n - row);
    uint16_t* to = out + WeightIndex(shape, first_row + row, 0);
    for (int64_t i = 0; i + 1 < k; i += 2, to += 2 * kPanelColumns) {
      for (int64_t c = 0; c < count; ++c) std::memcpy(to + 2 * c, w + (row + c) * k + i, 4);
    }
    if (k % 2 != 0) {
      for (int64_t c = 0; c < count; ++c) to[2 * c] = w[(row + c) * k + k - 1];
    }
    row += count;
  }
}

}  // namespace sluice::kernels
