// The sum over ranks. A thread sends its elements to every other rank, waits for the same elements
// of theirs, and adds them in the order of ranks. There is one way over the link and no fence.
#include <cuda_bf16.h>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/ranks/packs.cuh"
#include "kernels/cuda/ranks/peers.h"

namespace sluice::kernels::cuda {
namespace {

// How the elements of a type lie in a pack's words.
struct Float32Words {
  using Element = float;
  static constexpr int kEach = 1;
  __device__ static uint32_t Join(const float* e) { return __float_as_uint(e[0]); }
  __device__ static void Split(uint32_t word, float* e) { e[0] = __uint_as_float(word); }
  __device__ static float Widened(float e) { return e; }
  __device__ static float Rounded(float sum) { return sum; }
};
struct BFloat16Words {
  using Element = uint16_t;
  static constexpr int kEach = 2;
  __device__ static uint32_t Join(const uint16_t* e) {
    return e[0] | static_cast<uint32_t>(e[1]) << 16;
  }
  __device__ static void Split(uint32_t word, uint16_t* e) {
    e[0] = static_cast<uint16_t>(word);
    e[1] = static_cast<uint16_t>(word >> 16);
  }
  __device__ static float Widened(uint16_t e) {
    return __uint_as_float(static_cast<uint32_t>(e) << 16);
  }
  __device__ static uint16_t Rounded(float sum) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(sum));
  }
};

// kRanks: at least the group's size.
template <typename Words, int kRanks>
__global__ void __launch_bounds__(kPackThreads)
    AllReduceKernel(const __grid_constant__ PeerAllReduceParams p) {
  using Element = typename Words::Element;
  constexpr int kElements = 3 * Words::kEach;  // of a pack
  LetNextKernelStart();
  WaitForPriorKernels();
  const PeerGroup& g = p.group;
  const auto* in = static_cast<const Element*>(p.in);
  auto* out = static_cast<Element*>(p.out);
  const auto load = [&](int64_t pack, uint32_t(&data)[3]) {
    Element e[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int64_t at = pack * kElements + i;
      e[i] = at < p.count ? in[at] : Element{};
    }
#pragma unroll
    for (int w = 0; w < 3; ++w) data[w] = Words::Join(e + w * Words::kEach);
  };
  const int64_t packs = (p.count + kElements - 1) / kElements;
  const int64_t first = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kPackThreads;
  // Most operands are one pack to a thread, which is on its way beside the number.
  uint32_t own[3];
  load(first, own);
  bool failed;
  const uint32_t operation = ReadOperation(g, failed);
  if (failed) return;
  for (int64_t pack = first; pack < packs; pack += step) {
    if (pack != first) load(pack, own);
    for (int i = 1; i < g.size; ++i) {
      const int to = (g.rank + i) % g.size;
      StorePack(SlotOf(g, to, g.rank, operation) + pack * kPackBytes, own, operation);
    }
  }
  PassOperation(g, operation);
  for (int64_t pack = first; pack < packs; pack += step) {
    if (step < packs) load(pack, own);
    const auto slot = [&](int rank) {
      return SlotOf(g, g.rank, rank, operation) + pack * kPackBytes;
    };
    Pack parts[kRanks];
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      parts[rank] = {{own[0], own[1], own[2]}, operation};
      if (rank < g.size && rank != g.rank) parts[rank] = LoadPack(slot(rank));
    }
    float sums[kElements] = {};
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank >= g.size) break;
      if (!AwaitPack(g, slot(rank), operation, parts[rank])) return;
#pragma unroll
      for (int w = 0; w < 3; ++w) {
        Element e[Words::kEach];
        Words::Split(parts[rank].data[w], e);
#pragma unroll
        for (int j = 0; j < Words::kEach; ++j) {
          float& sum = sums[w * Words::kEach + j];
          sum = rank == 0 ? Words::Widened(e[j]) : sum + Words::Widened(e[j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int64_t at = pack * kElements + i;
      if (at < p.count) out[at] = Words::Rounded(sums[i]);
    }
  }
}

template <typename Words>
cudaError_t Launch(const PeerAllReduceParams& p, dim3 grid, cudaStream_t stream) {
  void (*const kernel)(PeerAllReduceParams) = p.group.size == 2 ? AllReduceKernel<Words, 2>
                                              : p.group.size <= 4
                                                  ? AllReduceKernel<Words, 4>
                                                  : AllReduceKernel<Words, kMaxPeerRanks>;
  return LaunchKernel(kernel, grid, dim3(kPackThreads), 0, stream, p);
}

}  // namespace

cudaError_t LaunchPeerAllReduce(const PeerAllReduceParams& p, cudaStream_t stream) {
  const bool narrow = p.type == DType::kBFloat16;
  if (!IsPeerGroup(p.group) || (!narrow && p.type != DType::kFloat32) || p.count < 0 ||
      PeerSlotBytes(p.count * SizeOf(p.type)) > p.group.slot_bytes) {
    return cudaErrorInvalidValue;
  }
  if (p.count == 0) return cudaSuccess;
  const int64_t bytes = p.count * SizeOf(p.type);
  const dim3 grid = PackGrid((bytes + kPackDataBytes - 1) / kPackDataBytes, p.max_blocks);
  return narrow ? Launch<BFloat16Words>(p, grid, stream) : Launch<Float32Words>(p, grid, stream);
}

}  // namespace sluice::kernels::cuda
