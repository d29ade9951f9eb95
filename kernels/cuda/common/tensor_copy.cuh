// Hopper's asynchronous machinery as device functions: barriers in shared memory, copies of
// tensor tiles into it (TMA), cluster barriers and reads of a neighbour's shared memory. PTX ISA
// 8.x, sm_90. `shared` addresses are 32-bit addresses of the shared window.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace sluice::kernels::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Initialises a barrier of one phase bit. A phase completes once `arrivals` threads have arrived
// and all bytes that they announced have landed.
__device__ __forceinline__ void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes a thread's earlier InitBarrier() calls visible to the copy engine.
__device__ __forceinline__ void PublishBarriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Returns true if the phase of that parity has completed. A true result orders later accesses, as
// WaitBarrier() does.
__device__ __forceinline__ bool TestBarrier(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Returns once the phase of that parity has completed.
__device__ __forceinline__ void WaitBarrier(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// Hints to the L2 cache, encoded as createpolicy.fractional would make them.
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000;  // data that is read once
inline constexpr uint64_t kEvictLast = 0x14F0000000000000;   // data that many blocks read

// Copies the tile of `map` whose first element is (column, row) to shared memory, and reports its
// bytes to `barrier`. Elements outside the tensor arrive as zeros.
__device__ __forceinline__ void CopyTile(uint32_t target, const CUtensorMap* map, int column,
                                         int row, uint32_t barrier, uint64_t cache_hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(cache_hint)
      : "memory");
}

// As above for a map of three dimensions, starting at (column, row, matrix).
__device__ __forceinline__ void CopyTile(uint32_t target, const CUtensorMap* map, int column,
                                         int row, int matrix, uint32_t barrier,
                                         uint64_t cache_hint) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
      "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier), "l"(cache_hint)
      : "memory");
}

// Copies `bytes` of plain memory. Both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void CopyBytes(uint32_t target, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
      : "memory");
}

// Prefetches the descriptor itself.
__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Synchronises all threads of all blocks of the cluster. Writes before it are visible after it.
__device__ __forceinline__ void SyncCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same barrier in two halves, without ordering memory: AwaitCluster() returns once every
// thread of the cluster has called LeaveCluster().
__device__ __forceinline__ void LeaveCluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void AwaitCluster() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// Loads a float4 from the shared memory of block `rank`; `shared` is its address in this block.
// Several loads may be under way at a time. Barriers of the cluster order them.
__device__ __forceinline__ float4 LoadFromBlock(uint32_t shared, int rank) {
  float4 v;
  asm volatile(
      "{\n"
      ".reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
      "}\n"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(shared), "r"(rank));
  return v;
}

// Stores two words to the shared memory of block `rank`, as LoadFromBlock() loads. The block has
// begun, which a barrier of the cluster says.
__device__ __forceinline__ void StoreToBlock(uint32_t shared, int rank, int2 v) {
  asm volatile(
      "{\n"
      ".reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.v2.s32 [remote], {%2, %3};\n"
      "}\n" ::"r"(shared),
      "r"(rank), "r"(v.x), "r"(v.y)
      : "memory");
}

}  // namespace sluice::kernels::cuda
