// Which scale 128 latent values are quantised by: one of kLatentScales in the octave above the
// least one, amax / 448, that with the least squared error. How large an element's step is beside
// it depends on where it lies between two powers of two, so that another scale than the least loses
// less now and then: of normal values 9 % (root mean square), at no cost in bits or bytes. Whoever
// reads an entry takes its scales as they are. Internal linkage, as in scalar.h.
#pragma once

#include <cstdint>

namespace sluice::kernels {
namespace {

constexpr int kLatentScales = 8;

// What the i-th scale is to the least one: 2^(i / 8).
constexpr float LatentScaleFactor(int i) {
  constexpr float kFactors[kLatentScales] = {1.0f,        1.09050775f, 1.18920708f, 1.29683959f,
                                             1.41421354f, 1.54221082f, 1.68179286f, 1.8340081f};
  return kFactors[i];
}

// `v` >= 0 rounded to the three bits of mantissa that e4m3 has, ties to even. Below 2^-6 of a unit
// e4m3 has coarser steps: squares of errors there are too small to decide.
constexpr float RoundedToE4M3(float v) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, v);
  return __builtin_bit_cast(float, (bits + 0x7FFFFu + ((bits >> 20) & 1u)) & 0xFFF00000u);
}

}  // namespace
}  // namespace sluice::kernels
