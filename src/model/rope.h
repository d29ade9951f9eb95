// Rotary position embedding: the settings of a model, and the frequencies that follow from them.
// These are pure values and functions, for any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace sluice {

enum class RopeKind { kDefault, kLinear, kLlama3, kYarn };

// Returns "default", "linear", "llama3" or "yarn".
const char* RopeKindName(RopeKind kind);

// The settings with every fallback resolved, whichever spelling config.json used. A field that the
// kind does not read keeps its default, so that equal settings compare equal.
struct RopeConfig {
  RopeKind kind = RopeKind::kDefault;
  double theta = 10000.0;
  double factor = 1.0;                           // linear, llama3, yarn
  int64_t original_max_position_embeddings = 0;  // llama3, yarn
  double low_freq_factor = 0.0;                  // llama3
  double high_freq_factor = 0.0;                 // llama3
  double beta_fast = 0.0;                        // yarn
  double beta_slow = 0.0;                        // yarn
  bool truncate = true;                          // yarn: round the correction range outwards
  double attention_factor = 1.0;                 // yarn: scale of cos and sin
  double mscale_all_dim = 0.0;                   // yarn; 0: not given. See YarnSoftmaxFactor

  bool operator==(const RopeConfig&) const = default;
};

// Returns yarn's attention factor (https://arxiv.org/abs/2309.00071, section 3.4) as transformers
// derives it if config.json does not give it: 0.1 ln(factor) + 1, or the ratio of the two mscales.
double YarnAttentionFactor(double factor, std::optional<double> mscale,
                           std::optional<double> mscale_all_dim);

// Returns [head_dim / 2] radians per position, float32, each step rounded as transformers 5.23
// rounds it. REQUIRES: head_dim is even and positive; LoadModelConfig accepted the settings.
std::vector<float> RopeInverseFrequencies(const RopeConfig& rope, int head_dim);

// Returns the factor by which MLA's softmax scale is multiplied twice: yarn's mscale for
// `mscale_all_dim`, else 1.
double YarnSoftmaxFactor(const RopeConfig& rope);

// Returns the factor by which cos and sin are multiplied: yarn's attention factor, else 1.
float RopeAttentionFactor(const RopeConfig& rope);

}  // namespace sluice
