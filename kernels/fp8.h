// Groups of e4m3 values with one float32 scale, as caches and weights have them. Internal linkage,
// as in scalar.h.
#pragma once

#include "kernels/e4m3.h"
#include "kernels/latent_params.h"

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

// The scale of a group whose largest magnitude is `largest`.
constexpr float E4M3Scale(float largest) { return largest > 0 ? largest / kE4M3Max : 1.0f; }

// Writes `count` values as e4m3; the result is their scale.
constexpr float QuantizeE4M3(const float* x, int64_t count, uint8_t* out) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = x[i] < 0 ? -x[i] : x[i];
    if (magnitude > largest) largest = magnitude;
  }
  const float scale = E4M3Scale(largest);
  for (int64_t i = 0; i < count; ++i) out[i] = FloatToE4M3(x[i] / scale);
  return scale;
}

}  // namespace
}  // namespace sluice::kernels
