// Words through which a kernel speaks, while it runs, with threads of the host (pinned memory) or
// with kernels of other GPUs (their memory).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sluice::kernels::cuda {

__device__ __forceinline__ uint32_t LoadAcquireSystem(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t LoadAcquireSystem(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t LoadRelaxedSystem(const void* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void StoreReleaseSystem(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void StoreReleaseSystem(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

}  // namespace sluice::kernels::cuda
