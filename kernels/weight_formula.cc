#include "kernels/weight_formula.h"

namespace sluice::kernels {

void FillWeights(const WeightFormula& formula, int64_t first, int64_t count, uint16_t* out) {
  const auto begin = static_cast<uint64_t>(first);
  for (int64_t j = 0; j < count; ++j) {
    out[j] = FormulaElement(formula, begin + static_cast<uint64_t>(j));
  }
}

void FillWeights(const WeightFormula& formula, int64_t first, int64_t count, uint8_t* out) {
  const auto begin = static_cast<uint64_t>(first);
  for (int64_t j = 0; j < count; ++j) {
    out[j] = FormulaE4M3(formula, begin + static_cast<uint64_t>(j));
  }
}

}  // namespace sluice::kernels
