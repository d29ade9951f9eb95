// Support for blocks whose warpgroups have different roles: barriers of a part of the threads,
// and registers that one role hands to another.
#pragma once

namespace sluice::kernels::cuda {

// Synchronises `threads` threads of the block, which are whole warps.
__device__ __forceinline__ void SyncThreads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Sets the registers of each thread of a warpgroup. All warps of the warpgroup call it.
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace sluice::kernels::cuda
