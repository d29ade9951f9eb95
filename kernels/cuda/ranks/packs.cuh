// The kernels of collectives share this: the number of an operation, packs, and how a kernel waits
// for another rank.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/common/system_words.cuh"
#include "kernels/peer_params.h"

namespace sluice::kernels::cuda {

inline constexpr int kPackThreads = 256;
// Two blocks to a multiprocessor of an H200: so many can run at one time beside a kernel that has
// begun early. 1 MiB is 1.3 packs to a thread.
inline constexpr int64_t kPackBlocks = 264;
// A thread looks at the word that stops it this often, which takes it over the link to the host.
inline constexpr uint32_t kPollsPerLook = 1024;

inline bool IsPeerGroup(const PeerGroup& g) {
  return g.size >= 2 && g.size <= kMaxPeerRanks && g.rank >= 0 && g.rank < g.size &&
         g.slot_bytes % kPackBytes == 0 && g.stop != nullptr;
}

inline dim3 PackGrid(int64_t packs, int32_t max_blocks) {
  const int64_t most = max_blocks > 0 ? std::min<int64_t>(max_blocks, kPackBlocks) : kPackBlocks;
  const int64_t blocks = (packs + kPackThreads - 1) / kPackThreads;
  return dim3(static_cast<unsigned>(std::min(blocks, most)));
}

struct Pack {
  uint32_t data[3];
  uint32_t operation;
};

__device__ __forceinline__ PeerWords* WordsOf(const PeerGroup& g, int rank) {
  return static_cast<PeerWords*>(g.areas[rank]);
}
// Returns the packs in the area of rank `owner` that rank `source` writes.
__device__ __forceinline__ char* SlotOf(const PeerGroup& g, int owner, int source,
                                        uint32_t operation) {
  const int64_t slot = static_cast<int64_t>(operation & 1) * g.size + source;
  return static_cast<char*>(g.areas[owner]) + kPeerSlots + slot * g.slot_bytes;
}

// One access of 128 bits each, which the memory model does not take apart.
__device__ __forceinline__ Pack LoadPack(const void* at) {
  uint64_t low, high;
  asm volatile(
      "{\n.reg .b128 pack;\n"
      "ld.relaxed.sys.global.b128 pack, [%2];\n"
      "mov.b128 {%0, %1}, pack;\n}"
      : "=l"(low), "=l"(high)
      : "l"(at)
      : "memory");
  return {
      {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high)},
      static_cast<uint32_t>(high >> 32)};
}
__device__ __forceinline__ void StorePack(void* at, const uint32_t (&data)[3], uint32_t operation) {
  const uint64_t low = data[0] | static_cast<uint64_t>(data[1]) << 32;
  const uint64_t high = data[2] | static_cast<uint64_t>(operation) << 32;
  asm volatile(
      "{\n.reg .b128 pack;\n"
      "mov.b128 pack, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], pack;\n}" ::"l"(at),
      "l"(low), "l"(high)
      : "memory");
}

// Returns the number of this operation. 0, which slots have at first, is left out, and with it 1,
// since odd and even numbers take turns. REQUIRES: it comes behind WaitForPriorKernels().
__device__ __forceinline__ uint32_t ReadOperation(const PeerGroup& g, bool& failed) {
  uint64_t both;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
               : "=l"(both)
               : "l"(&WordsOf(g, g.rank)->operations)
               : "memory");
  failed = both >> 32 != 0;
  const uint32_t next = static_cast<uint32_t>(both) + 1;
  return next == 0 ? 2 : next;
}

// Moves the number on once all blocks have read it. Every thread of a block calls it, behind
// ReadOperation; it does not wait for other blocks.
__device__ __forceinline__ void PassOperation(const PeerGroup& g, uint32_t operation) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  PeerWords* const own = WordsOf(g, g.rank);
  if (atomicAdd(&own->readers, 1u) != gridDim.x - 1) return;
  own->readers = 0;
  own->operations = operation;
}

// Counts the polls of one wait. Returns true once the group has failed.
__device__ __forceinline__ bool GivesUp(const PeerGroup& g, uint32_t& polls) {
  if (++polls % kPollsPerLook != 0 || LoadRelaxedSystem(g.stop) == 0) return false;
  atomicExch(&WordsOf(g, g.rank)->failed, 1u);
  return true;
}

// Waits for a pack, of which `pack` is what was last read. False: the group has failed.
__device__ __forceinline__ bool AwaitPack(const PeerGroup& g, const void* at, uint32_t operation,
                                          Pack& pack) {
  for (uint32_t polls = 0; pack.operation != operation; pack = LoadPack(at)) {
    if (GivesUp(g, polls)) return false;
  }
  return true;
}

}  // namespace sluice::kernels::cuda
