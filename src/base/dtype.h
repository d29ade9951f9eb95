// Element types of caches and activations, and conversions between bfloat16 and float32.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "kernels/params.h"

namespace sluice {

using kernels::DType;
using kernels::SizeOf;

constexpr std::string_view DTypeName(DType t) {
  return t == DType::kFloat32 ? "float32" : t == DType::kBFloat16 ? "bf16" : "fp8";
}

constexpr float BFloat16ToFloat(uint16_t v) {
  return std::bit_cast<float>(static_cast<uint32_t>(v) << 16);
}

// Rounds to nearest, ties to even. NaN stays NaN.
constexpr uint16_t FloatToBFloat16(float v) {
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace sluice
