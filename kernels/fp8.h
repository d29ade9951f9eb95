// Groups of e4m3 values with one float32 scale, as caches and weights have them. Internal linkage,
// as in scalar.h.
#pragma once

#include "kernels/e4m3.h"
#include "kernels/latent_params.h"
#include "kernels/latent_scales.h"

namespace sluice::kernels {
namespace {

// All 256 values, for loops on a CPU.
struct E4M3Values {
  float of[256];
};
constexpr E4M3Values MakeE4M3Values() {
  E4M3Values values{};
  for (int i = 0; i < 256; ++i) values.of[i] = E4M3ToFloat(static_cast<uint8_t>(i));
  return values;
}

// Returns the scale of a group whose largest magnitude is `largest`.
constexpr float E4M3Scale(float largest) { return largest > 0 ? largest / kE4M3Max : 1.0f; }

// Returns the largest magnitude; a NaN does not count.
constexpr float LargestMagnitude(const float* x, int64_t count) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = x[i] < 0 ? -x[i] : x[i];
    if (magnitude > largest) largest = magnitude;
  }
  return largest;
}

constexpr void QuantizeBy(float scale, const float* x, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = FloatToE4M3(x[i] / scale);
}

// Writes `count` values as e4m3 and returns their scale.
constexpr float QuantizeE4M3(const float* x, int64_t count, uint8_t* out) {
  const float scale = E4M3Scale(LargestMagnitude(x, count));
  QuantizeBy(scale, x, count, out);
  return scale;
}

// Writes kPackedScaleTokens latent values as e4m3 and returns their scale, the best of the
// candidates (latent_scales.h). Sums run in 16 lanes; the first of equals is taken.
inline float QuantizeLatents(const float* x, uint8_t* out) {
  constexpr int64_t kLanes = 16;
  const float least = E4M3Scale(LargestMagnitude(x, kPackedScaleTokens));
  alignas(64) float y[kPackedScaleTokens];
  for (int64_t i = 0; i < kPackedScaleTokens; ++i) y[i] = __builtin_fabsf(x[i]) / least;
  float best = 0, best_error = 0;
  for (int32_t candidate = 0; candidate < kLatentScales; ++candidate) {
    const float factor = LatentScaleFactor(candidate), inverse = 1.0f / factor;
    alignas(64) float sums[kLanes] = {};
    for (int64_t i = 0; i < kPackedScaleTokens; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const float exact = y[i + lane] * inverse;
        const float off = RoundedToE4M3(exact) - exact;
        sums[lane] += off * off;
      }
    }
    float error = 0;
    for (const float sum : sums) error += sum;
    error *= factor * factor;
    if (candidate > 0 && !(error < best_error)) continue;
    best = least * factor;
    best_error = error;
  }
  QuantizeBy(best, x, kPackedScaleTokens, out);
  return best;
}

}  // namespace
}  // namespace sluice::kernels
