// Digests in the making: the least and the largest of elements as they lie in memory, 16 bytes at a
// time.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace sluice::kernels::cuda {

// The elements in four bytes of a row: a float, or two bf16. Least and largest are
// exact (denormals too), and ignore NaNs.
template <typename T>
struct Word;

template <>
struct Word<float> {
  static constexpr uint32_t kInfinity = 0x7f800000u, kMinusInfinity = 0xff800000u;
  __device__ static uint32_t Least(uint32_t a, uint32_t b) {
    return __float_as_uint(fminf(__uint_as_float(a), __uint_as_float(b)));
  }
  __device__ static uint32_t Largest(uint32_t a, uint32_t b) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  }
};

template <>
struct Word<__nv_bfloat16> {
  static constexpr uint32_t kInfinity = 0x7f807f80u, kMinusInfinity = 0xff80ff80u;
  __device__ static uint32_t Least(uint32_t a, uint32_t b) {
    return Bits(__hmin2(Pair(a), Pair(b)));
  }
  __device__ static uint32_t Largest(uint32_t a, uint32_t b) {
    return Bits(__hmax2(Pair(a), Pair(b)));
  }

 private:
  __device__ static __nv_bfloat162 Pair(uint32_t bits) {
    return *reinterpret_cast<const __nv_bfloat162*>(&bits);
  }
  __device__ static uint32_t Bits(__nv_bfloat162 pair) {
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

template <typename T>
__device__ __forceinline__ void KeepLeast(uint4& x, const uint4& y) {
  x = {Word<T>::Least(x.x, y.x), Word<T>::Least(x.y, y.y), Word<T>::Least(x.z, y.z),
       Word<T>::Least(x.w, y.w)};
}
template <typename T>
__device__ __forceinline__ void KeepLargest(uint4& x, const uint4& y) {
  x = {Word<T>::Largest(x.x, y.x), Word<T>::Largest(x.y, y.y), Word<T>::Largest(x.z, y.z),
       Word<T>::Largest(x.w, y.w)};
}

__device__ __forceinline__ uint4 FromLane(const uint4& v, int lane) {
  return {__shfl_sync(0xffffffffu, v.x, lane), __shfl_sync(0xffffffffu, v.y, lane),
          __shfl_sync(0xffffffffu, v.z, lane), __shfl_sync(0xffffffffu, v.w, lane)};
}

}  // namespace sluice::kernels::cuda
