// Every rank's part on every rank, by packs of any bytes.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/ranks/packs.cuh"
#include "kernels/cuda/ranks/peers.h"

namespace sluice::kernels::cuda {
namespace {

// Parts are read and written by words if they begin and end at multiples of 4 bytes. What travels
// is the same, so ranks whose operands lie otherwise go together.
template <bool kByWords>
__device__ __forceinline__ uint32_t LoadWord(const uint8_t* part, int64_t at, int64_t end) {
  if constexpr (kByWords) {
    return at < end ? *reinterpret_cast<const uint32_t*>(part + at) : 0;
  } else {
    uint32_t word = 0;
    for (int i = 0; i < 4 && at + i < end; ++i) word |= uint32_t{part[at + i]} << (8 * i);
    return word;
  }
}
template <bool kByWords>
__device__ __forceinline__ void StoreWord(uint8_t* part, int64_t at, int64_t end, uint32_t word) {
  if constexpr (kByWords) {
    if (at < end) *reinterpret_cast<uint32_t*>(part + at) = word;
  } else {
    for (int i = 0; i < 4 && at + i < end; ++i) {
      part[at + i] = static_cast<uint8_t>(word >> (8 * i));
    }
  }
}

template <bool kByWords>
__global__ void __launch_bounds__(kPackThreads)
    AllGatherKernel(const __grid_constant__ PeerAllGatherParams p) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const PeerGroup& g = p.group;
  bool failed;
  const uint32_t operation = ReadOperation(g, failed);
  if (failed) return;
  const auto* in = static_cast<const uint8_t*>(p.in);
  auto* out = static_cast<uint8_t*>(p.out);
  uint8_t* const own = out + g.rank * p.bytes;
  const int64_t packs = (p.bytes + kPackDataBytes - 1) / kPackDataBytes;
  const int64_t first = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kPackThreads;
  for (int64_t pack = first; pack < packs; pack += step) {
    uint32_t data[3];
#pragma unroll
    for (int w = 0; w < 3; ++w) {
      const int64_t at = pack * kPackDataBytes + w * 4;
      data[w] = LoadWord<kByWords>(in, at, p.bytes);
      if (in != own) StoreWord<kByWords>(own, at, p.bytes, data[w]);
    }
    for (int i = 1; i < g.size; ++i) {
      const int to = (g.rank + i) % g.size;
      StorePack(SlotOf(g, to, g.rank, operation) + pack * kPackBytes, data, operation);
    }
  }
  PassOperation(g, operation);
  for (int i = 1; i < g.size; ++i) {
    const int from = (g.rank + i) % g.size;
    const char* slot = SlotOf(g, g.rank, from, operation);
    uint8_t* const part = out + from * p.bytes;
    for (int64_t pack = first; pack < packs; pack += step) {
      const char* const at = slot + pack * kPackBytes;
      Pack arrived = LoadPack(at);
      if (!AwaitPack(g, at, operation, arrived)) return;
#pragma unroll
      for (int w = 0; w < 3; ++w) {
        StoreWord<kByWords>(part, pack * kPackDataBytes + w * 4, p.bytes, arrived.data[w]);
      }
    }
  }
}

}  // namespace

cudaError_t LaunchPeerAllGather(const PeerAllGatherParams& p, cudaStream_t stream) {
  if (!IsPeerGroup(p.group) || p.bytes < 0 || PeerSlotBytes(p.bytes) > p.group.slot_bytes) {
    return cudaErrorInvalidValue;
  }
  if (p.bytes == 0) return cudaSuccess;
  const dim3 grid = PackGrid((p.bytes + kPackDataBytes - 1) / kPackDataBytes, p.max_blocks);
  const bool by_words = AreAligned(4, p.in, p.out) && p.bytes % 4 == 0;
  return LaunchKernel(by_words ? AllGatherKernel<true> : AllGatherKernel<false>, grid,
                      dim3(kPackThreads), 0, stream, p);
}

}  // namespace sluice::kernels::cuda
