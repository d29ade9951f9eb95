// The few best tokens of a row as a list in the shared memory of the cluster's first block, which
// finishes sampling without the other blocks.
#pragma once

#include <cstdint>

#include "kernels/cuda/sample/sample_select.cuh"

namespace sluice::kernels::cuda {

struct Candidate {
  float logit;
  int32_t id;
  uint64_t weight;
};

__device__ __forceinline__ bool IsBetter(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Two threads compare a candidate with all others.
constexpr int kMaxCandidates = kSampleThreads / 2;

// A block's own candidates and, in the first block, those of all blocks, in no order.
struct ListMemory {
  Candidate own[kMaxCandidates];
  Candidate all[kMaxCandidates];
};
static_assert(sizeof(ListMemory) <= sizeof(SelectMemory::bins), "a list lies in the bins");

__device__ __forceinline__ ListMemory& ListOf(SelectMemory& memory) {
  return *reinterpret_cast<ListMemory*>(memory.bins);
}

// Puts the tokens for which takes(logit, id) is true into the first block's list. Returns their
// number, or -1 if there is no room, and then the bins are as before. REQUIRES: `own_count` is 0
// and the bins are not in use. ClearList() restores both.
template <typename Takes>
__device__ int GatherCandidates(Cluster& cluster, SelectMemory& memory, int& own_count,
                                const Slice& slice, Takes takes) {
  ListMemory& list = ListOf(memory);
  slice.ForEachFour([&](const float(&l)[4], int id) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!takes(l[j], id + j) || id + j >= slice.begin + slice.count) continue;
      // Past the end the exact count does not matter, so tokens need not be counted one by one.
      if (*const_cast<volatile int*>(&own_count) > kMaxCandidates) continue;
      const int at = atomicAdd(&own_count, 1);
      if (at < kMaxCandidates) list.own[at] = {l[j], id + j, 0};
    }
  });
  __syncthreads();
  const uint64_t own = threadIdx.x == 0 ? static_cast<uint64_t>(own_count) : 0;
  const uint64_t total = cluster.Sum(own).total;
  if (total > kMaxCandidates) {
    for (int i = threadIdx.x; i < kBins; i += kSampleThreads) memory.bins[i] = {0, 0};
    __syncthreads();
    if (threadIdx.x == 0) own_count = 0;
    cluster.Sync();
    return -1;
  }
  if (cluster.rank() == 0) {
    int block = 0;
    int at = threadIdx.x;
    for (; block < kClusterBlocks; ++block) {
      const int count = *cluster.At(&own_count, block);
      if (at < count) break;
      at -= count;
    }
    if (block < kClusterBlocks) list.all[threadIdx.x] = cluster.At(list.own, block)[at];
  }
  cluster.Sync();
  return static_cast<int>(total);
}

__device__ __forceinline__ void ClearList(Cluster& cluster, SelectMemory& memory, int& own_count) {
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kSampleThreads) memory.bins[i] = {0, 0};
  if (threadIdx.x == 0) own_count = 0;
  cluster.Sync();
}

// Gathers at least the `count` best tokens, and few more. Every thread's best token (`mine`, its
// logit) is counted by its distance from the best of all. The distance within which there are
// `count` of them bounds that of the count-th best token. The result is the same as
// GatherCandidates would give.
__device__ __forceinline__ int GatherBest(Cluster& cluster, SelectMemory& memory, int& own_count,
                                          const Slice& slice, float best, float mine, int count) {
  constexpr int kShift = 31 - kFirstBits;  // distances have no sign
  const auto bin_of = [&](float l) {
    return static_cast<int>(__float_as_uint(fabsf(best - l)) >> kShift);
  };
  CountTokens::Add(memory.bins[bin_of(mine)], 1);
  cluster.Sync();
  const int bin = cluster.rank() * kSampleThreads + static_cast<int>(threadIdx.x);
  const uint64_t sum = SumOfBin(cluster, memory, bin);
  const uint64_t before = cluster.Sum(sum).before;
  ShareFound(cluster, memory, kBins, before, sum, static_cast<uint64_t>(count), bin);
  const int last = memory.found.bin;
  return GatherCandidates(cluster, memory, own_count, slice,
                          [&](float l, int) { return bin_of(l) <= last; });
}

}  // namespace sluice::kernels::cuda
