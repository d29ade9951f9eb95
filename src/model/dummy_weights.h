// Weights from a formula, so that a model of any size can be made from config.json alone and has
// known answers. Element i of a tensor is a hash of (seed, tensor name, i), scaled by the kind of
// tensor. It is the formula of the fixtures in tests/fixtures (uniform() and randomise() of the
// script that made their golden outputs), and it must never change.
#pragma once

#include <cstdint>
#include <string>

#include "absl/types/span.h"
#include "kernels/weight_formula.h"
#include "src/model/tensor_list.h"

namespace sluice {

inline constexpr uint64_t kDummySeed = 20261121;

// Sets out[j] = u(name, first + j) in [-1, 1), exact in float32:
//   state = fnv1a64(name) xor seed; z = output number i of splitmix64 from state;
//   u = (z >> 40) / 2^23 - 1.
void DummyUniform(const std::string& name, uint64_t seed, int64_t first, absl::Span<float> out);

// Returns the formula of a dummy tensor. Norm weights are 1 + 0.3 u, biases 0.2 u, embeddings 1.7 u
// (0.25 u if they are the output head too), matrices gain / sqrt(columns) * u with gain 2.0 for
// q_proj and k_proj, 1.4 for o_proj and down_proj, 0.08 for down_proj of routed experts, 2.8 for
// the others.
kernels::WeightFormula DummyFormula(const TensorSpec& tensor, bool tied_head, uint64_t seed);

// Returns the formula whose element i is element first + i of `formula`.
kernels::WeightFormula FormulaFrom(const kernels::WeightFormula& formula, int64_t first);

// Fills `out` with the elements [first, first + out.size()) of a dummy tensor as bf16.
void FillDummy(const TensorSpec& tensor, bool tied_head, uint64_t seed, int64_t first,
               absl::Span<uint16_t> out);

}  // namespace sluice
