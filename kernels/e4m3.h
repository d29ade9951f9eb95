// Conversions between e4m3 (float8 of 4 bits of exponent, bias 7, and 3 of mantissa, without
// infinities: 0x7F is NaN, 0x7E is 448) and float32. (OCP 8-bit floating point specification, OFP8,
// the type that frameworks call float8_e4m3fn.) Internal linkage, as in scalar.h.
#pragma once

#include <cstdint>

namespace sluice::kernels {
namespace {

// Converts exactly.
constexpr float E4M3ToFloat(uint8_t v) {
  const uint32_t sign = static_cast<uint32_t>(v & 0x80u) << 24;
  const uint32_t exponent = (v >> 3) & 0xFu;
  const uint32_t mantissa = v & 0x7u;
  if ((v & 0x7Fu) == 0x7Fu) return __builtin_bit_cast(float, sign | 0x7FC00000u);
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-9
    const float magnitude = static_cast<float>(mantissa) * 0x1.0p-9f;
    return sign != 0 ? -magnitude : magnitude;
  }
  return __builtin_bit_cast(float, sign | ((exponent + 120) << 23) | (mantissa << 20));
}

// Rounds to nearest, ties to even. Values beyond 448 become 448; NaN stays NaN.
constexpr uint8_t FloatToE4M3(float v) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, v);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  uint32_t rounded = 0;
  if (magnitude > 0x7F800000u) {
    rounded = 0x7Fu;
  } else if (magnitude >= 0x43E00000u) {  // 448
    rounded = 0x7Eu;
  } else if (magnitude < 0x3C800000u) {
    // Below 2^-6 values are multiples of 2^-9, which are the last bits of floats at 2^14.
    const float shifted = __builtin_bit_cast(float, magnitude) + 0x1.0p14f;
    rounded = __builtin_bit_cast(uint32_t, shifted) - __builtin_bit_cast(uint32_t, 0x1.0p14f);
  } else {
    rounded = ((magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  }
  return static_cast<uint8_t>(sign | rounded);
}

}  // namespace
}  // namespace sluice::kernels
