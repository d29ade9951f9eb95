// What blocks whose warpgroups have different roles need: barriers of some threads alone, and
// registers that one role hands to another.
#pragma once

namespace sluice::kernels::cuda {

// Of `threads` threads of the block, whole warps.
__device__ __forceinline__ void SyncThreads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// By all warps of a warpgroup; each has so many registers from then on.
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace sluice::kernels::cuda
