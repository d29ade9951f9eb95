// Floats as unsigned integers that sort in the same order.
#pragma once

#include <cmath>
#include <cstdint>

namespace sluice::kernels::cuda {

// Both zeros have the same key.
__device__ __forceinline__ uint32_t KeyOf(float v) {
  const uint32_t bits = __float_as_uint(v + 0.0f);
  return bits ^ (static_cast<int32_t>(bits) < 0 ? 0xFFFFFFFFu : 0x80000000u);
}
__device__ __forceinline__ float FloatOf(uint32_t key) {
  return __uint_as_float(key ^ (static_cast<int32_t>(key) < 0 ? 0x80000000u : 0xFFFFFFFFu));
}

// Returns a key by which the best score is least. NaN counts as -inf.
__device__ __forceinline__ uint32_t RankKey(float score) { return ~KeyOf(fmaxf(score, -INFINITY)); }

}  // namespace sluice::kernels::cuda
