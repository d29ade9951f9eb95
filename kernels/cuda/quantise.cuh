// A warp's 128 values in the packed form: four neighbours a lane, one scale.
#pragma once

#include "kernels/cuda/float8.cuh"
#include "kernels/latent_params.h"

namespace sluice::kernels::cuda {

// The sum over a warp, the same in every lane.
__device__ __forceinline__ float WarpSum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, step);
  return v;
}

// The scale of the 128 values that a warp holds: largest magnitude / 448, or 1 where all are 0. A
// NaN does not count.
__device__ __forceinline__ float WarpScale(float4 v) {
  const float mine = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  // Floats that are not negative are ordered as their bits.
  const float amax = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(mine)));
  return amax == 0.0f ? 1.0f : amax / kE4M3Max;
}

// This lane's four, by a true division: a product with the reciprocal rounds differently.
__device__ __forceinline__ uint32_t Quantised(float4 v, float scale) {
  return PackE4M3({v.x / scale, v.y / scale, v.z / scale, v.w / scale});
}

}  // namespace sluice::kernels::cuda
