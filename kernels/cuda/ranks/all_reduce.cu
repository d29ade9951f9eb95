// The sum over ranks. In one stage a thread sends its elements to every other rank, waits for the
// same elements of theirs, and adds them in the order of ranks. There is one way over the link and
// no fence.
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

// The operand of a sum in packs.
template <typename Words>
struct Operand {
  using Element = typename Words::Element;
  static constexpr int kElements = 3 * Words::kEach;  // of a pack
  const Element* in;
  Element* out;
  int64_t count;

  __device__ explicit Operand(const PeerAllReduceParams& p)
      : in(static_cast<const Element*>(p.in)), out(static_cast<Element*>(p.out)), count(p.count) {}
  __device__ int64_t packs() const { return (count + kElements - 1) / kElements; }
  __device__ __forceinline__ void Load(int64_t pack, uint32_t (&data)[3]) const {
    Element e[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int64_t at = pack * kElements + i;
      e[i] = at < count ? in[at] : Element{};
    }
#pragma unroll
    for (int w = 0; w < 3; ++w) data[w] = Words::Join(e + w * Words::kEach);
  }
  __device__ __forceinline__ void Store(int64_t pack, const Element (&e)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int64_t at = pack * kElements + i;
      if (at < count) out[at] = e[i];
    }
  }
};

// Waits for the other ranks' parts of a pack, and adds all in the order of ranks. kRanks: at least
// the group's size. False: the group has failed.
template <typename Words, int kRanks>
__device__ __forceinline__ bool AwaitSum(
    const PeerGroup& g, int64_t pack, uint32_t operation, const uint32_t (&own)[3],
    typename Words::Element (&out)[Operand<Words>::kElements]) {
  constexpr int kElements = Operand<Words>::kElements;
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
    if (!AwaitPack(g, slot(rank), operation, parts[rank])) return false;
#pragma unroll
    for (int w = 0; w < 3; ++w) {
      typename Words::Element e[Words::kEach];
      Words::Split(parts[rank].data[w], e);
#pragma unroll
      for (int j = 0; j < Words::kEach; ++j) {
        float& sum = sums[w * Words::kEach + j];
        sum = rank == 0 ? Words::Widened(e[j]) : sum + Words::Widened(e[j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) out[i] = Words::Rounded(sums[i]);
  return true;
}

template <typename Words, int kRanks>
__global__ void __launch_bounds__(kPackThreads)
    AllReduceKernel(const __grid_constant__ PeerAllReduceParams p) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const PeerGroup& g = p.group;
  const Operand<Words> operand(p);
  const int64_t packs = operand.packs();
  const int64_t first = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kPackThreads;
  // Most operands are one pack to a thread, which is on its way beside the number.
  uint32_t own[3];
  operand.Load(first, own);
  bool failed;
  const uint32_t operation = ReadOperation(g, failed);
  if (failed) return;
  for (int64_t pack = first; pack < packs; pack += step) {
    if (pack != first) operand.Load(pack, own);
    for (int i = 1; i < g.size; ++i) {
      const int to = (g.rank + i) % g.size;
      StorePack(SlotOf(g, to, g.rank, operation) + pack * kPackBytes, own, operation);
    }
  }
  PassOperation(g, operation);
  for (int64_t pack = first; pack < packs; pack += step) {
    if (step < packs) operand.Load(pack, own);
    typename Words::Element sums[Operand<Words>::kElements];
    if (!AwaitSum<Words, kRanks>(g, pack, operation, own, sums)) return;
    operand.Store(pack, sums);
  }
}

// The sum in two stages: every rank has a part of the packs, of which the others send it theirs,
// and sends them the sums. So a rank sends 2 / size of what it sends in one stage, and waits twice.
// A slot takes the packs of both stages, since those that a rank sends as an owner are not those
// that it sends to the owner of the slot.
template <typename Words, int kRanks>
__global__ void __launch_bounds__(kPackThreads)
    AllReduceInStagesKernel(const __grid_constant__ PeerAllReduceParams p) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const PeerGroup& g = p.group;
  const Operand<Words> operand(p);
  const int64_t packs = operand.packs();
  const int64_t part = (packs + g.size - 1) / g.size;
  const int64_t first = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kPackThreads;
  uint32_t data[3];
  operand.Load(first, data);
  bool failed;
  const uint32_t operation = ReadOperation(g, failed);
  if (failed) return;
  const auto slot = [&](int of, int from, int64_t pack) {
    return SlotOf(g, of, from, operation) + pack * kPackBytes;
  };
  for (int64_t pack = first; pack < packs; pack += step) {
    const int owner = static_cast<int>(pack / part);
    if (owner == g.rank) continue;
    if (pack != first) operand.Load(pack, data);
    StorePack(slot(owner, g.rank, pack), data, operation);
  }
  PassOperation(g, operation);
  const int64_t end = min((g.rank + 1) * part, packs);
  for (int64_t pack = g.rank * part + first; pack < end; pack += step) {
    operand.Load(pack, data);
    typename Words::Element sums[Operand<Words>::kElements];
    if (!AwaitSum<Words, kRanks>(g, pack, operation, data, sums)) return;
    operand.Store(pack, sums);
#pragma unroll
    for (int w = 0; w < 3; ++w) data[w] = Words::Join(sums + w * Words::kEach);
    for (int i = 1; i < g.size; ++i) {
      const int to = (g.rank + i) % g.size;
      StorePack(slot(to, g.rank, pack), data, operation);
    }
  }
  // A thread has sent what it overwrites here, because these are its packs of the first loop.
  for (int64_t pack = first; pack < packs; pack += step) {
    const int owner = static_cast<int>(pack / part);
    if (owner == g.rank) continue;
    const char* const at = slot(g.rank, owner, pack);
    Pack sum = LoadPack(at);
    if (!AwaitPack(g, at, operation, sum)) return;
    typename Words::Element sums[Operand<Words>::kElements];
#pragma unroll
    for (int w = 0; w < 3; ++w) Words::Split(sum.data[w], sums + w * Words::kEach);
    operand.Store(pack, sums);
  }
}

template <typename Words>
cudaError_t Launch(const PeerAllReduceParams& p, dim3 grid, cudaStream_t stream) {
  void (*kernel)(PeerAllReduceParams) = nullptr;
  if (p.stages == 2) {
    kernel = p.group.size <= 4 ? AllReduceInStagesKernel<Words, 4>
                               : AllReduceInStagesKernel<Words, kMaxPeerRanks>;
  } else if (p.group.size == 2) {
    kernel = AllReduceKernel<Words, 2>;
  } else {
    kernel = p.group.size <= 4 ? AllReduceKernel<Words, 4> : AllReduceKernel<Words, kMaxPeerRanks>;
  }
  return LaunchKernel(kernel, grid, dim3(kPackThreads), 0, stream, p);
}

}  // namespace

cudaError_t LaunchPeerAllReduce(const PeerAllReduceParams& p, cudaStream_t stream) {
  const bool narrow = p.type == DType::kBFloat16;
  if (!IsPeerGroup(p.group) || (!narrow && p.type != DType::kFloat32) || p.count < 0 ||
      p.stages < 1 || p.stages > 2 ||
      PeerSlotBytes(p.count * SizeOf(p.type)) > p.group.slot_bytes) {
    return cudaErrorInvalidValue;
  }
  if (p.count == 0) return cudaSuccess;
  const int64_t packs = (p.count * SizeOf(p.type) + kPackDataBytes - 1) / kPackDataBytes;
  if (p.stages == 2 && packs < LeastStagedPacks(p.group.size)) return cudaErrorInvalidValue;
  const dim3 grid = PackGrid(packs, p.max_blocks);
  return narrow ? Launch<BFloat16Words>(p, grid, stream) : Launch<Float32Words>(p, grid, stream);
}

}  // namespace sluice::kernels::cuda
