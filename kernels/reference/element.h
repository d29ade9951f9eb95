// Reading and writing an element of either type as a double.
#pragma once

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

}  // namespace
}  // namespace sluice::kernels::reference
