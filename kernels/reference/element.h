// Reading and writing elements, and reading weights of any layout, as doubles.
#pragma once

#include <vector>

#include "kernels/fp8.h"
#include "kernels/scalar.h"

namespace sluice::kernels::reference {
namespace {

inline double Get(const void* data, DType type, int64_t i) {
  return type == DType::kFloat32 ? static_cast<const float*>(data)[i]
                                 : Bf16ToFloat(static_cast<const uint16_t*>(data)[i]);
}

inline void Put(void* data, DType type, int64_t i, double value) {
  if (type == DType::kFloat32) {
    static_cast<float*>(data)[i] = static_cast<float>(value);
  } else {
    static_cast<uint16_t*>(data)[i] = FloatToBf16(static_cast<float>(value));
  }
}

inline double WeightValue(const WeightMatrix& w, int64_t row, int64_t column) {
  const int64_t at = WeightIndex(w, row, column);
  switch (w.layout) {
    case WeightLayout::kFloat32:
      return reinterpret_cast<const float*>(w.data)[at];
    case WeightLayout::kFp8Blocks: {
      const int64_t across = CeilDiv(w.k, kFp8BlockColumns);
      const double scale = w.scales[row / kFp8BlockRows * across + column / kFp8BlockColumns];
      return scale * double{E4M3ToFloat(reinterpret_cast<const uint8_t*>(w.data)[at])};
    }
    default:
      return Bf16ToFloat(w.data[at]);
  }
}

inline std::vector<double> WeightRow(const WeightMatrix& w, int64_t row) {
  std::vector<double> values(static_cast<size_t>(w.k));
  for (int64_t i = 0; i < w.k; ++i) values[static_cast<size_t>(i)] = WeightValue(w, row, i);
  return values;
}

}  // namespace
}  // namespace sluice::kernels::reference
