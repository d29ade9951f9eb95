// Loads and stores of four neighbouring elements at a time: 16 bytes of float32, 8 bytes of bf16.
#pragma once

#include <cuda_bf16.h>

#include "kernels/params.h"

namespace sluice::kernels::cuda {

// Returns true if every one of the addresses may be read as a vector of `bytes`.
template <typename... Pointers>
bool AreAligned(uintptr_t bytes, Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % bytes == 0) && ...);
}

// Returns elements [i, i + 4) of x; those at `end` and past it are 0. REQUIRES: if `aligned`, x +
// i is 16-byte aligned and end is a multiple of 4.
__device__ __forceinline__ float4 Load4(const float* x, int i, int end, bool aligned) {
  if (aligned) {
    return i < end ? *reinterpret_cast<const float4*>(x + i) : float4{0, 0, 0, 0};
  }
  return {i < end ? x[i] : 0, i + 1 < end ? x[i + 1] : 0, i + 2 < end ? x[i + 2] : 0,
          i + 3 < end ? x[i + 3] : 0};
}

// Packs two elements, rounded to nearest even, as they lie in memory.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Writes elements [i, i + 4) of row `out`, which has `end` elements, in `type`. Alignment is as
// for Load4.
__device__ __forceinline__ void Store4(void* out, DType type, int64_t row_start, int i, int end,
                                       bool aligned, float4 v) {
  if (i >= end) return;
  if (type == DType::kFloat32) {
    float* to = static_cast<float*>(out) + row_start + i;
    if (aligned) {
      *reinterpret_cast<float4*>(to) = v;
      return;
    }
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j < end) to[j] = values[j];
    }
    return;
  }
  const uint2 packed = {PackBf16(v.x, v.y), PackBf16(v.z, v.w)};
  uint16_t* to = static_cast<uint16_t*>(out) + row_start + i;
  if (aligned) {
    *reinterpret_cast<uint2*>(to) = packed;
    return;
  }
  const uint16_t values[4] = {
      static_cast<uint16_t>(packed.x), static_cast<uint16_t>(packed.x >> 16),
      static_cast<uint16_t>(packed.y), static_cast<uint16_t>(packed.y >> 16)};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (i + j < end) to[j] = values[j];
  }
}

}  // namespace sluice::kernels::cuda
