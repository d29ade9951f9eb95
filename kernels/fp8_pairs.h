// The form in which a GPU's products read e4m3 weights. Only the makers of weights and those
// products know it, so it is no enumerator of WeightLayout, which every kernel includes.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace sluice::kernels {

// The form is kFp8Blocks with k a multiple of 16, but the pairs of neighbours among each 16 columns
// of a row are in the order 0 4 1 5 2 6 3 7. So a lane of the tensor cores takes four neighbouring
// bytes of a row for 16 of k, and one ldmatrix brings two such groups of 16 to all lanes.
inline constexpr WeightLayout kFp8Pairs{4};

constexpr bool HasFp8Pairs(int32_t k) { return k % 16 == 0; }

// Returns the index of column i within its row.
constexpr int64_t PairedPlace(int64_t i) {
  return i - i % 16 + i % 8 / 2 * 4 + i % 16 / 8 * 2 + i % 2;
}

}  // namespace sluice::kernels
