// Conversions to and from e4m3 by the hardware, with the bits of kernels/e4m3.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/latent_params.h"

namespace sluice::kernels::cuda {

// Packs four values, the first in the lowest byte. Rounding is to nearest even, values beyond 448
// become 448, and NaN stays NaN.
__device__ __forceinline__ uint32_t PackE4M3(float4 v) {
  uint32_t packed;
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "  cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "  mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(packed)
      : "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w));
  return packed;
}

// Converts four values to fp16, which holds them exactly: the first two, then the others.
__device__ __forceinline__ uint2 WidenE4M3(uint32_t four) {
  uint2 pairs;
  asm("{\n"
      "  .reg .b16 low, high;\n"
      "  mov.b32 {low, high}, %2;\n"
      "  cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "  cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}"
      : "=r"(pairs.x), "=r"(pairs.y)
      : "r"(four));
  return pairs;
}

}  // namespace sluice::kernels::cuda
