// e4m3 of the OCP 8-bit floating point formats (finite values and NaN, largest 448), and groups of
// values with one float32 scale, as caches and weights have them. Internal linkage, as in scalar.h.
#pragma once

#include "kernels/latent_params.h"
#include "kernels/scalar.h"

namespace sluice::kernels {
namespace {

// Exact. 0x7F and 0xFF are NaN.
constexpr float E4M3ToFloat(uint8_t v) {
  const uint32_t sign = static_cast<uint32_t>(v & 0x80u) << 24;
  const uint32_t exponent = v >> 3 & 15u, mantissa = v & 7u;
  if ((v & 0x7Fu) == 0x7Fu) return __builtin_bit_cast(float, sign | 0x7FC00000u);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return __builtin_bit_cast(float, sign | (exponent + 120u) << 23 | mantissa << 20);
}

// Round to nearest, ties to even; what is larger than 448, infinities too, becomes 448; NaN stays.
constexpr uint8_t FloatToE4M3(float v) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, v);
  const uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7FFFFFFFu;
  uint32_t code = 0;
  if (magnitude > 0x7F800000u) {
    code = 0x7Fu;
  } else if (magnitude < (121u << 23)) {
    // Below 2^-6: multiples of 2^-9, which is the last place of 2^14.
    const float sum = __builtin_bit_cast(float, magnitude) + 0x1p14f;
    code = __builtin_bit_cast(uint32_t, sum) - __builtin_bit_cast(uint32_t, 0x1p14f);
  } else {
    code = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
    if (code > 0x7Eu) code = 0x7Eu;
  }
  return static_cast<uint8_t>(sign | code);
}

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
