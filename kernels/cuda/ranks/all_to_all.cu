// The exchange of units that the device counts. A rank says to the others that it takes data, which
// it may once the kernels before this one are done with what it receives. Then each writes its
// units straight into the other's memory, and says so.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/ranks/packs.cuh"
#include "kernels/cuda/ranks/peers.h"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 512;
// Blocks of a launch. Half of a pair's fill a link, and the others copy what stays.
constexpr int kBlocks = 2 * kMaxPeerParts;
constexpr int kAtOnce = 4;  // vectors of a thread under way

__device__ __forceinline__ void CopyVectors(const uint4* from, uint4* to, int64_t begin,
                                            int64_t end) {
  for (int64_t at = begin + threadIdx.x; at < end; at += kThreads * kAtOnce) {
    uint4 taken[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (at + i * kThreads < end) taken[i] = from[at + i * kThreads];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (at + i * kThreads < end) to[at + i * kThreads] = taken[i];
    }
  }
}

// The grid is size x parts. Block (other, part) sends its share of the units for rank `other`, and
// waits for the same share of those that come from there.
__global__ void __launch_bounds__(kThreads)
    AllToAllKernel(const __grid_constant__ PeerAllToAllParams p, int parts) {
  __shared__ bool stopped;
  LetNextKernelStart();
  WaitForPriorKernels();
  const PeerGroup& g = p.group;
  bool failed;
  const uint32_t operation = ReadOperation(g, failed);
  if (failed) return;
  const int thread = threadIdx.x;
  if (blockIdx.x == 0 && thread < g.size && thread != g.rank) {
    StoreReleaseSystem(&WordsOf(g, thread)->ready[g.rank], operation);
  }
  PassOperation(g, operation);

  const int other = blockIdx.x / parts, part = blockIdx.x % parts;
  const int32_t count = min(max(p.send_counts[other], 0), p.capacity);
  const int64_t block = int64_t{p.capacity} * p.unit_bytes / 16;
  const int64_t vectors = (int64_t{count} * p.unit_bytes + 15) / 16;
  const int64_t share = (vectors + parts - 1) / parts;
  const int64_t begin = min(part * share, vectors), end = min(begin + share, vectors);
  const auto* from = static_cast<const uint4*>(p.send) + other * block;
  auto* to = static_cast<uint4*>(p.receives[other]) + g.rank * block;
  if (other == g.rank) {
    CopyVectors(from, to, begin, end);
    if (part == 0 && thread == 0) p.receive_counts[other] = count;
    return;
  }
  uint32_t polls = 0;
  if (thread == 0) {
    stopped = false;
    while (!stopped && LoadAcquireSystem(&WordsOf(g, g.rank)->ready[other]) != operation) {
      stopped = GivesUp(g, polls);
    }
  }
  __syncthreads();
  if (stopped) return;
  CopyVectors(from, to, begin, end);
  __syncthreads();
  if (thread != 0) return;
  StoreReleaseSystem(&WordsOf(g, other)->arrived[g.rank][part],
                     static_cast<uint64_t>(operation) << 32 | static_cast<uint32_t>(count));
  const uint64_t* const arrived = &WordsOf(g, g.rank)->arrived[other][part];
  uint64_t word = LoadAcquireSystem(arrived);
  for (; word >> 32 != operation; word = LoadAcquireSystem(arrived)) {
    if (GivesUp(g, polls)) return;
  }
  if (part == 0) p.receive_counts[other] = static_cast<int32_t>(static_cast<uint32_t>(word));
}

}  // namespace

cudaError_t LaunchPeerAllToAll(const PeerAllToAllParams& p, cudaStream_t stream) {
  if (!IsPeerGroup(p.group) || p.capacity <= 0 || p.unit_bytes <= 0 ||
      int64_t{p.capacity} * p.unit_bytes % 16 != 0 || !AreAligned(16, p.send)) {
    return cudaErrorInvalidValue;
  }
  for (int rank = 0; rank < p.group.size; ++rank) {
    if (!AreAligned(16, p.receives[rank])) return cudaErrorInvalidValue;
  }
  const int parts = kBlocks / p.group.size;
  return LaunchKernel(AllToAllKernel, dim3(static_cast<unsigned>(p.group.size * parts)),
                      dim3(kThreads), 0, stream, p, parts);
}

}  // namespace sluice::kernels::cuda
