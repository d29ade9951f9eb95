// The steps that the blocks of one cluster, which share a row of logits, take together. All sums
// are of integers, so that they are the same in whatever order they are added.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sluice::kernels::cuda {

constexpr int kWarpSize = 32;
constexpr int kSampleThreads = 512;
constexpr int kSampleWarps = kSampleThreads / kWarpSize;
constexpr int kClusterBlocks = 8;  // the most that every GPU of the architecture takes

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// Returns the sum over this warp's lanes up to and including this one.
__device__ __forceinline__ uint64_t SumThroughLane(uint64_t value) {
#pragma unroll
  for (int lane = 1; lane < kWarpSize; lane *= 2) {
    const uint64_t other = __shfl_up_sync(kAllLanes, value, lane);
    if (threadIdx.x % kWarpSize >= lane) value += other;
  }
  return value;
}

// Shared memory through which the blocks' warps exchange their values. Two sets are used in turn:
// a block may still read one while another block, a step ahead, writes the other.
struct ClusterExchange {
  uint64_t values[2][kClusterBlocks * kSampleWarps];
};

// The steps of a cluster. Every thread of the cluster makes the same calls in the same order.
class Cluster {
 public:
  __device__ explicit Cluster(ClusterExchange& exchange)
      : exchange_(exchange), rank_(static_cast<int>(__clusterRelativeBlockRank())) {}

  __device__ int rank() const { return rank_; }
  __device__ void Sync() {
    Arrive();
    Wait();
  }
  // Sync() in two halves.
  __device__ void Arrive() { __cluster_barrier_arrive(); }
  __device__ void Wait() { __cluster_barrier_wait(); }

  // Returns the address in `block` that corresponds to `mine` in this block.
  template <typename T>
  __device__ T* At(T* mine, int block) {
    return static_cast<T*>(__cluster_map_shared_rank(mine, block));
  }

  // Returns the largest value of all threads.
  __device__ uint64_t Max(uint64_t value) {
    for (int lane = kWarpSize / 2; lane > 0; lane /= 2) {
      value = Larger(value, __shfl_xor_sync(kAllLanes, value, lane));
    }
    const uint64_t* values = Exchange(value);
    value = 0;
#pragma unroll
    for (int i = Lane(); i < kClusterBlocks * kSampleWarps; i += kWarpSize) {
      value = Larger(value, values[i]);
    }
    for (int lane = kWarpSize / 2; lane > 0; lane /= 2) {
      value = Larger(value, __shfl_xor_sync(kAllLanes, value, lane));
    }
    return value;
  }

  // The sum over the threads before this one, with blocks in order of rank, and the sum over all
  // threads.
  struct Scan {
    uint64_t before;
    uint64_t total;
  };
  __device__ Scan Sum(uint64_t value) {
    const uint64_t through = SumThroughLane(value);
    const uint64_t* values = Exchange(__shfl_sync(kAllLanes, through, kWarpSize - 1));
    const int mine = rank_ * kSampleWarps + threadIdx.x / kWarpSize;
    Scan scan = {0, 0};
#pragma unroll
    for (int i = Lane(); i < kClusterBlocks * kSampleWarps; i += kWarpSize) {
      scan.total += values[i];
      scan.before += i < mine ? values[i] : 0;
    }
    for (int lane = kWarpSize / 2; lane > 0; lane /= 2) {
      scan.total += __shfl_xor_sync(kAllLanes, scan.total, lane);
      scan.before += __shfl_xor_sync(kAllLanes, scan.before, lane);
    }
    scan.before += through - value;
    return scan;
  }

 private:
  __device__ static int Lane() { return threadIdx.x % kWarpSize; }
  __device__ static uint64_t Larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

  // Returns every warp's value, by rank and warp.
  __device__ const uint64_t* Exchange(uint64_t value) {
    uint64_t* values = exchange_.values[turn_];
    turn_ ^= 1;
    if (Lane() < kClusterBlocks) {
      At(values, Lane())[rank_ * kSampleWarps + threadIdx.x / kWarpSize] = value;
    }
    Sync();
    return values;
  }

  ClusterExchange& exchange_;
  const int rank_;
  int turn_ = 0;
};

}  // namespace sluice::kernels::cuda
