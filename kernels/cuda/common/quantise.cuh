// Quantisation of a warp's 128 values to the packed form: four neighbours a lane, one scale.
#pragma once

#include "kernels/cuda/common/float8.cuh"
#include "kernels/latent_params.h"
#include "kernels/latent_scales.h"

namespace sluice::kernels::cuda {

// Returns the sum over a warp, the same in every lane.
__device__ __forceinline__ float WarpSum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  return v;
}

// Returns the scale of the 128 values that a warp holds: largest magnitude / 448, or 1 if all are
// 0. NaNs do not count.
__device__ __forceinline__ float WarpScale(float4 v) {
  const float mine = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  // Non-negative floats are ordered as their bits.
  const float amax = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(mine)));
  return amax == 0.0f ? 1.0f : amax / kE4M3Max;
}

// As above for latent values: returns the candidate scale with the least error. It costs some 300
// instructions of a warp.
__device__ __forceinline__ float WarpLatentScale(float4 v) {
  const float least = WarpScale(v);
  const float y[4] = {fabsf(v.x) / least, fabsf(v.y) / least, fabsf(v.z) / least,
                      fabsf(v.w) / least};
  float errors[kLatentScales];
#pragma unroll
  for (int candidate = 0; candidate < kLatentScales; ++candidate) {
    const float factor = LatentScaleFactor(candidate), inverse = 1.0f / factor;
    float error = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float exact = y[i] * inverse;
      const float off = RoundedToE4M3(exact) - exact;
      error = fmaf(off, off, error);
    }
    errors[candidate] = error * (factor * factor);
  }
  // Lane l ends with the warp's sum of candidate l / 4. At each step a lane hands away the half
  // of its candidates that is not its own.
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = kLatentScales / 2; half > 0; half /= 2) {
    const bool upper = (lane & (4 * half)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float given = upper ? errors[i] : errors[i + half];
      const float kept = upper ? errors[i + half] : errors[i];
      errors[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, given, 4 * half);
    }
  }
#pragma unroll
  for (int step = 2; step > 0; step /= 2) {
    errors[0] += __shfl_xor_sync(0xFFFFFFFFu, errors[0], step);
  }
  // Errors are not negative (a NaN is above all), so they are ordered as their bits.
  const uint32_t mine = __float_as_uint(errors[0]);
  const uint32_t lowest = __reduce_min_sync(0xFFFFFFFFu, mine);
  const int best = (__ffs(__ballot_sync(0xFFFFFFFFu, mine == lowest)) - 1) / 4;
  return least * LatentScaleFactor(best);
}

// Quantises this lane's four values by a true division: a product with the reciprocal would round
// differently.
__device__ __forceinline__ uint32_t Quantised(float4 v, float scale) {
  return PackE4M3({v.x / scale, v.y / scale, v.z / scale, v.w / scale});
}

}  // namespace sluice::kernels::cuda
