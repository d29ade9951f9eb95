#include "src/model/dummy_weights.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/match.h"

namespace sluice {
namespace {

uint64_t Fnv1a64(const std::string& text) {
  uint64_t h = 0xCBF29CE484222325ull;
  for (const char c : text) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001B3ull;
  return h;
}

double Gain(const std::string& name) {
  if (absl::StrContains(name, ".experts.") && absl::EndsWith(name, "down_proj.weight")) return 0.08;
  if (absl::EndsWith(name, "o_proj.weight") || absl::EndsWith(name, "down_proj.weight")) return 1.4;
  if (absl::EndsWith(name, "q_proj.weight") || absl::EndsWith(name, "k_proj.weight")) return 2.0;
  return 2.8;
}

}  // namespace

void DummyUniform(const std::string& name, uint64_t seed, int64_t first, absl::Span<float> out) {
  const uint64_t state = Fnv1a64(name) ^ seed;
  const auto begin = static_cast<uint64_t>(first);
  for (size_t j = 0; j < out.size(); ++j) out[j] = kernels::WeightUniform(state, begin + j);
}

kernels::WeightFormula DummyFormula(const TensorSpec& tensor, bool tied_head, uint64_t seed) {
  const std::string& name = tensor.name;
  const uint64_t state = Fnv1a64(name) ^ seed;
  if (absl::StrContains(name, "norm") && absl::EndsWith(name, "weight")) {
    return {state, 0.3f, 1.0f};
  }
  double scale = 0;
  if (absl::EndsWith(name, "bias")) {
    scale = 0.2;
  } else if (absl::StrContains(name, "embed_tokens")) {
    scale = tied_head ? 0.25 : 1.7;
  } else {
    scale = Gain(name) / std::sqrt(static_cast<double>(tensor.shape.back()));
  }
  return {state, static_cast<float>(scale), 0.0f};
}

kernels::WeightFormula FormulaFrom(const kernels::WeightFormula& formula, int64_t first) {
  // Output number i of splitmix64 depends on state + (i + 1) times its increment alone.
  constexpr uint64_t kIncrement = 0x9E3779B97F4A7C15ull;
  const auto skipped = static_cast<uint64_t>(first);
  kernels::WeightFormula from = formula;
  from.state += skipped * kIncrement;
  if (from.live != ~uint64_t{0}) from.live -= std::min(from.live, skipped);
  return from;
}

void FillDummy(const TensorSpec& tensor, bool tied_head, uint64_t seed, int64_t first,
               absl::Span<uint16_t> out) {
  kernels::FillWeights(DummyFormula(tensor, tied_head, seed), first,
                       static_cast<int64_t>(out.size()), out.data());
}

}  // namespace sluice
