// Weights from a formula, so that a model of any size can be made from its shapes alone, on the
// device that holds them, and has known answers. Element i of a tensor is
//   z = output number i of splitmix64 from `state`; u = (z >> 40) / 2^23 - 1;
//   bf16(offset + scale * u), every operation rounded to float32, the last one to nearest even;
// or 0 from element `live` on (rows that write nothing). An fp8 weight is e4m3(448 * u), and all
// have one scale, FormulaScale(); the offset must then be 0. The fixtures in tests/fixtures use the
// same formula; it must never change.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/e4m3.h"

namespace sluice::kernels {

struct WeightFormula {
  uint64_t state;  // fnv1a64(tensor name) xor seed
  float scale;
  float offset;
  uint64_t live = ~uint64_t{0};
};

// Returns u of element i, in [-1, 1), exact in float32.
constexpr float WeightUniform(uint64_t state, uint64_t i) {
  uint64_t z = state + (i + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return static_cast<float>(static_cast<int32_t>(z >> 40)) / 8388608.0f - 1.0f;
}

// Returns element i as bf16. REQUIRES: the file is compiled without contraction of a * b + c.
// Offset and scale are finite, so there is no branch for NaN.
constexpr uint16_t FormulaElement(const WeightFormula& formula, uint64_t i) {
  if (i >= formula.live) return 0;
  const float value = formula.offset + formula.scale * WeightUniform(formula.state, i);
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// These return element i as e4m3, and the scale that all elements share.
constexpr uint8_t FormulaE4M3(const WeightFormula& formula, uint64_t i) {
  return i >= formula.live ? uint8_t{0} : FloatToE4M3(448.0f * WeightUniform(formula.state, i));
}
constexpr float FormulaScale(const WeightFormula& formula) { return formula.scale / 448.0f; }

// Writes out[j] = element first + j as bf16, or as e4m3, for j in [0, count).
void FillWeights(const WeightFormula& formula, int64_t first, int64_t count, uint16_t* out);
void FillWeights(const WeightFormula& formula, int64_t first, int64_t count, uint8_t* out);

}  // namespace sluice::kernels
