// The form in which a GPU's products read e4m3 weights. Their makers and those products alone know
// it, so it is no enumerator of WeightLayout, which every kernel includes.
#pragma once

#include <cstdint>

#include "kernels/params.h"

namespace sluice::kernels {

// As kFp8Blocks, k a multiple of 16, but of each 16 columns of a row the pairs of neighbours in the
// order 0 4 1 5 2 6 3 7. So four neighbouring bytes are what a lane of the tensor cores takes of a
// row for 16 of k, and one ldmatrix brings it to all lanes for twice 16.
inline constexpr WeightLayout kFp8Pairs{4};

constexpr bool HasFp8Pairs(int32_t k) { return k % 16 == 0; }

// Where column i of a row lies in it.
constexpr int64_t PairedPlace(int64_t i) {
  return i - i % 16 + i % 8 / 2 * 4 + i % 16 / 8 * 2 + i % 2;
}

}  // namespace sluice::kernels
