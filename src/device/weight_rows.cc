#include "src/device/weight_rows.h"

#include <algorithm>

#include "kernels/e4m3.h"
#include "src/base/dtype.h"

namespace sluice {
namespace {

// Converts elements [begin, begin + count) of a row.
void FloatPiece(const MatrixPart& part, int32_t row, int32_t k, int32_t begin, int32_t count,
                float* out) {
  const int64_t at = int64_t{row} * k + begin;
  if (part.data != nullptr) {
    std::transform(part.data + at, part.data + at + count, out, BFloat16ToFloat);
  } else if (part.values != nullptr) {
    std::copy_n(part.values + at, count, out);
  } else if (part.fp8 != nullptr) {
    const float* scales =
        part.scales + int64_t{row / kScaleBlock} * ((k + kScaleBlock - 1) / kScaleBlock);
    for (int32_t i = 0; i < count; ++i) {
      out[i] = kernels::E4M3ToFloat(part.fp8[at + i]) * scales[(begin + i) / kScaleBlock];
    }
  } else if (part.fp8_formula) {
    const float scale = kernels::FormulaScale(part.formula);
    for (int32_t i = 0; i < count; ++i) {
      const auto element = static_cast<uint64_t>(at + i);
      out[i] = kernels::E4M3ToFloat(kernels::FormulaE4M3(part.formula, element)) * scale;
    }
  } else {
    for (int32_t i = 0; i < count; ++i) {
      const auto element = static_cast<uint64_t>(at + i);
      out[i] = BFloat16ToFloat(kernels::FormulaElement(part.formula, element));
    }
  }
}

}  // namespace

bool IsBFloat16(const MatrixPart& part) {
  return part.data != nullptr ||
         (part.values == nullptr && part.fp8 == nullptr && !part.fp8_formula);
}

void FloatRow(const MatrixPart& part, int32_t row, int32_t k, float* out) {
  FloatPiece(part, row, k, 0, k, out);
}

void BFloat16Row(const MatrixPart& part, int32_t row, int32_t k, uint16_t* out) {
  const int64_t at = int64_t{row} * k;
  if (part.data != nullptr) {
    std::copy_n(part.data + at, k, out);
  } else if (IsBFloat16(part)) {
    kernels::FillWeights(part.formula, at, k, out);
  } else {
    constexpr int32_t kPiece = 256;
    float values[kPiece];
    for (int32_t begin = 0; begin < k; begin += kPiece) {
      const int32_t count = std::min(kPiece, k - begin);
      FloatPiece(part, row, k, begin, count, values);
      std::transform(values, values + count, out + begin, FloatToBFloat16);
    }
  }
}

}  // namespace sluice
