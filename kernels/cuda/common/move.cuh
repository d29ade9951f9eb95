// A warp's copy between memories one of which may lie across the link. The warp starts as many
// loads as registers allow before the first store waits for its data. Loads are plain and bypass
// L1, because bulk copies (TMA) reach half of their speed on rows of host memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sluice::kernels::cuda {

inline constexpr int kWarp = 32;

__device__ __forceinline__ void LoadOnce(const uint4* from, uint4& value) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
}
__device__ __forceinline__ void LoadOnce(const uint32_t* from, uint32_t& value) {
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(from));
}
__device__ __forceinline__ void LoadOnce(const uint8_t* from, uint8_t& value) {
  uint32_t wide;
  asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(wide) : "l"(from));
  value = static_cast<uint8_t>(wide);
}

__device__ __forceinline__ void StoreOnce(uint4* to, const uint4& value) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ __forceinline__ void StoreOnce(uint32_t* to, uint32_t value) {
  asm volatile("st.global.L1::no_allocate.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void StoreOnce(uint8_t* to, uint8_t value) { *to = value; }

__device__ __forceinline__ bool BothAligned(const void* a, const void* b, unsigned bytes) {
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) & (bytes - 1)) == 0;
}

// Returns true if stores to `address` go over the link.
inline bool IsHostMemory(const void* address) {
  cudaPointerAttributes attributes{};
  return cudaPointerGetAttributes(&attributes, address) == cudaSuccess &&
         attributes.type == cudaMemoryTypeHost;
}

}  // namespace sluice::kernels::cuda
