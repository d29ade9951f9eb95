#include "src/model/dummy_weights.h"

#include <cmath>

#include "absl/strings/match.h"
#include "src/base/dtype.h"

namespace sluice {
namespace {

uint64_t Fnv1a64(const std::string& text) {
  uint64_t h = 0xCBF29CE484222325ull;
  for (const char c : text) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001B3ull;
  return h;
}

// Output number i of splitmix64 from `state`, as a float in [-1, 1).
inline float Uniform(uint64_t state, uint64_t i) {
  uint64_t z = state + (i + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return static_cast<float>(static_cast<int32_t>(z >> 40)) / 8388608.0f - 1.0f;
}

// bf16 of a finite number: what FloatToBFloat16 does, without its branch for NaN.
inline uint16_t RoundFinite(float v) {
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

double Gain(const std::string& name) {
  if (absl::EndsWith(name, "o_proj.weight") || absl::EndsWith(name, "down_proj.weight")) return 1.4;
  if (absl::EndsWith(name, "q_proj.weight") || absl::EndsWith(name, "k_proj.weight")) return 2.0;
  return 2.8;
}

}  // namespace

void DummyUniform(const std::string& name, uint64_t seed, int64_t first, absl::Span<float> out) {
  const uint64_t state = Fnv1a64(name) ^ seed;
  const auto begin = static_cast<uint64_t>(first);
  for (size_t j = 0; j < out.size(); ++j) out[j] = Uniform(state, begin + j);
}

void FillDummy(const TensorSpec& tensor, bool tied_head, uint64_t seed, int64_t first,
               absl::Span<uint16_t> out) {
  const std::string& name = tensor.name;
  const uint64_t state = Fnv1a64(name) ^ seed;
  const auto begin = static_cast<uint64_t>(first);
  if (absl::StrContains(name, "norm") && absl::EndsWith(name, "weight")) {
    for (size_t j = 0; j < out.size(); ++j) {
      out[j] = RoundFinite(1.0f + 0.3f * Uniform(state, begin + j));
    }
    return;
  }
  double scale = 0;
  if (absl::EndsWith(name, "bias")) {
    scale = 0.2;
  } else if (absl::StrContains(name, "embed_tokens")) {
    scale = tied_head ? 0.25 : 1.7;
  } else {
    scale = Gain(name) / std::sqrt(static_cast<double>(tensor.shape.back()));
  }
  const auto factor = static_cast<float>(scale);
  for (size_t j = 0; j < out.size(); ++j) out[j] = RoundFinite(factor * Uniform(state, begin + j));
}

}  // namespace sluice
