// Instructions that the attention kernels share: asynchronous copies to shared memory, ldmatrix,
// mma.sync on bf16, and float32 as a sum of two bf16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/common/tensor_copy.cuh"
#include "kernels/cuda/common/vectors.cuh"

namespace sluice::kernels::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float NegativeInfinity() { return __int_as_float(0xff800000); }

// Starts a copy of 16 bytes from global to shared memory that bypasses L1. If `valid` is false,
// it writes zeros and does not read `from`.
__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `pending` of this thread's newest groups of copies are under way.
template <int pending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Orders this thread's earlier writes to shared memory before the reads of the tensor cores
// (wgmma) and the writes of the copy engine that follow the next barrier.
__device__ __forceinline__ void PublishToAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// As above, for accesses to the shared memory of any block of the cluster.
__device__ __forceinline__ void PublishClusterToAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cluster;" ::: "memory");
}

__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Computes c[16][8] += a[16][16] b[16][8] with bf16 operands and float32 sums.
__device__ __forceinline__ void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same with fp16 operands.
__device__ __forceinline__ void MultiplyAddFp16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Splits two floats into bf16 pairs whose sum keeps 16 bits of each: x = high + low (1 + 2^-17).
__device__ __forceinline__ void SplitBf16(float x, float y, uint32_t& high, uint32_t& low) {
  high = PackBf16(x, y);
  low = PackBf16(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
}

// Returns 2^x to 2 ulp; 2^-inf is 0.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Stores `value` rounded to the type of the output.
__device__ __forceinline__ void StoreAs(float* to, float value) { *to = value; }
__device__ __forceinline__ void StoreAs(__nv_bfloat16* to, float value) {
  *to = __float2bfloat16_rn(value);
}

}  // namespace sluice::kernels::cuda
