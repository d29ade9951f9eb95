#include "src/model/rope.h"

#include <algorithm>
#include <cmath>

#include "src/base/status_macros.h"

namespace sluice {
namespace {

// The arithmetic is float32, in the order of transformers' modeling_rope_utils.py. Where that
// divides a number by a tensor, torch multiplies by the reciprocal, which rounds twice; so does
// this code.
float DividedBy(double number, float x) { return static_cast<float>(number) * (1.0f / x); }

// Returns theta ^ (2i / head_dim), [head_dim / 2].
std::vector<float> PositionFrequencies(double theta, int head_dim) {
  std::vector<float> out(static_cast<size_t>(head_dim / 2));
  for (size_t i = 0; i < out.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_dim);
    out[i] = std::pow(static_cast<float>(theta), exponent);
  }
  return out;
}

// Does what apply_scaling of https://github.com/meta-llama/llama-models does: long waves are slowed
// down by `factor`, short ones are kept, and between them is a linear transition.
float ScaleLlama3(const RopeConfig& rope, float inv_freq) {
  const double old_context = static_cast<double>(rope.original_max_position_embeddings);
  const auto low_wavelength = static_cast<float>(old_context / rope.low_freq_factor);
  const auto high_wavelength = static_cast<float>(old_context / rope.high_freq_factor);
  const auto factor = static_cast<float>(rope.factor);
  const float wavelength = DividedBy(2 * M_PI, inv_freq);
  if (wavelength < high_wavelength) return inv_freq;
  if (wavelength > low_wavelength) return inv_freq / factor;
  const float smooth =
      (DividedBy(old_context, wavelength) - static_cast<float>(rope.low_freq_factor)) /
      static_cast<float>(rope.high_freq_factor - rope.low_freq_factor);
  return (1.0f - smooth) * inv_freq / factor + smooth * inv_freq;
}

// Returns the pair whose wave makes `rotations` turns within the original context.
double YarnCorrectionDim(double rotations, int head_dim, const RopeConfig& rope) {
  const double context = static_cast<double>(rope.original_max_position_embeddings);
  return head_dim * std::log(context / (rotations * 2 * M_PI)) / (2 * std::log(rope.theta));
}

std::vector<float> YarnFrequencies(const RopeConfig& rope, int head_dim) {
  double low = YarnCorrectionDim(rope.beta_fast, head_dim, rope);
  double high = YarnCorrectionDim(rope.beta_slow, head_dim, rope);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(head_dim - 1));
  if (low == high) high += 0.001;

  std::vector<float> out = PositionFrequencies(rope.theta, head_dim);
  for (size_t i = 0; i < out.size(); ++i) {
    const float extrapolated = 1.0f / out[i];
    const float interpolated = 1.0f / (static_cast<float>(rope.factor) * out[i]);
    const float ramp = std::clamp(
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f,
        1.0f);
    const float keep = 1.0f - ramp;
    out[i] = interpolated * (1.0f - keep) + extrapolated * keep;
  }
  return out;
}

double YarnMscale(double scale, double mscale) {
  return scale <= 1 ? 1.0 : 0.1 * mscale * std::log(scale) + 1.0;
}

}  // namespace

const char* RopeKindName(RopeKind kind) {
  switch (kind) {
    case RopeKind::kDefault:
      return "default";
    case RopeKind::kLinear:
      return "linear";
    case RopeKind::kLlama3:
      return "llama3";
    case RopeKind::kYarn:
      return "yarn";
  }
  return "?";
}

double YarnAttentionFactor(double factor, std::optional<double> mscale,
                           std::optional<double> mscale_all_dim) {
  if (mscale.value_or(0) != 0 && mscale_all_dim.value_or(0) != 0) {
    return YarnMscale(factor, *mscale) / YarnMscale(factor, *mscale_all_dim);
  }
  return YarnMscale(factor, 1.0);
}

std::vector<float> RopeInverseFrequencies(const RopeConfig& rope, int head_dim) {
  SLUICE_CHECK(head_dim > 0 && head_dim % 2 == 0, "head_dim ", head_dim);
  if (rope.kind == RopeKind::kYarn) return YarnFrequencies(rope, head_dim);
  std::vector<float> out = PositionFrequencies(rope.theta, head_dim);
  for (float& f : out) {
    f = 1.0f / f;
    if (rope.kind == RopeKind::kLinear) f /= static_cast<float>(rope.factor);
    if (rope.kind == RopeKind::kLlama3) f = ScaleLlama3(rope, f);
  }
  return out;
}

double YarnSoftmaxFactor(const RopeConfig& rope) {
  if (rope.kind != RopeKind::kYarn || rope.mscale_all_dim == 0) return 1.0;
  return YarnMscale(rope.factor, rope.mscale_all_dim);
}

float RopeAttentionFactor(const RopeConfig& rope) {
  return rope.kind == RopeKind::kYarn ? static_cast<float>(rope.attention_factor) : 1.0f;
}

}  // namespace sluice
