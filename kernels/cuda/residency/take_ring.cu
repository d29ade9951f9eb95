// Takes units out of the ring that CPU workers fill (TakeRingParams) while they fill it.
//
// Bytes moved: the ring's units over the link, as much in HBM, and a word each way for each bundle.
// Floor: the link, or the workers. Every warp has a worker, of which it takes each n-th bundle
// where n warps have the same, so no warp waits for a worker that is not its own. A warp's round is
// a read of the word, two or more of the data, and a write of the word: some 5 us over the link, in
// which 64 warps bring half a megabyte. The ring is a few MiB, within the reach of the GPU's
// address translation, however large the arena is out of which the workers gather.
//
// Data that CPUs wrote is read past every cache, and never by a read-only path: a place has another
// bundle a moment later.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/move.cuh"
#include "kernels/cuda/common/system_words.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocks = 4;
constexpr int kLoads = 8;  // in flight per lane
constexpr unsigned kAll = 0xFFFFFFFFu;

static_assert(kMostBundleUnits <= kWarp, "a lane holds a unit's target");

// Returns the units of a bundle once it is there, or 0 if it will never be. The words are read by
// one lane, in this order: what a worker wrote before the round's end is seen.
__device__ __forceinline__ int32_t AwaitBundle(const TakeRingParams& p, int64_t place,
                                               int64_t bundle) {
  int32_t units = 0;
  if (threadIdx.x % kWarp == 0) {
    const uint32_t* const word = &p.words[place].value;
    units = RingUnits(LoadAcquireSystem(word), bundle);
    while (units == 0) {
      const bool over = p.open == nullptr || LoadAcquireSystem(p.open) == 0;
      units = RingUnits(LoadAcquireSystem(word), bundle);
      if (over) break;
      // Polls of many warps would take a part of the link.
      if (units == 0) __nanosleep(200);
    }
  }
  return __shfl_sync(kAll, units, 0);
}

// Copies a bundle, in words of T. Word c of it is word c % words of part c / words, counted over
// its units.
template <typename T>
__device__ __forceinline__ void CopyBundle(const TakeRingParams& p, int64_t place, int32_t units) {
  const int lane = threadIdx.x % kWarp;
  const T* const from =
      reinterpret_cast<const T*>(static_cast<const char*>(p.units) + place * p.place_bytes);
  int32_t target_unit = -1;
  if (lane < units) {
    const int32_t entry = __ldcv(p.entries + place * kMostBundleUnits + lane);
    if (entry >= 0) target_unit = __ldcg(p.target_units + entry);
  }
  const int32_t words = p.unit_bytes / static_cast<int32_t>(sizeof(T));
  const int32_t total = units * p.parts * words;
  for (int32_t first = 0; first < total; first += kLoads * kWarp) {
    T value[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int32_t word = first + i * kWarp + lane;
      if (word < total) value[i] = __ldcv(from + word);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int32_t word = first + i * kWarp + lane;
      const int32_t part = word / words, unit = part / p.parts;
      const int32_t to = __shfl_sync(kAll, target_unit, unit % kWarp);
      if (word >= total || to < 0) continue;
      const int64_t at =
          int64_t{part - unit * p.parts} * p.part_pitch + int64_t{word - part * words} * sizeof(T);
      StoreOnce(reinterpret_cast<T*>(static_cast<char*>(p.target) + to * p.target_pitch + at),
                value[i]);
    }
  }
}

// Grid: any that has at least as many warps as there are workers; block: kThreads.
__global__ void __launch_bounds__(kThreads)
    TakeRingKernel(const __grid_constant__ TakeRingParams p, bool wide) {
  WaitForPriorKernels();
  LetNextKernelStart();  // SparseMlaParams::then_arrives relies on this order
  const int warps = static_cast<int>(gridDim.x) * kWarps;
  const int warp = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  const int worker = warp % p.workers;
  const int mates = (warps - worker + p.workers - 1) / p.workers;  // warps of this worker
  for (int64_t bundle = warp / p.workers;; bundle += mates) {
    const int64_t place = int64_t{worker} * p.depth + bundle % p.depth;
    const int32_t units = AwaitBundle(p, place, bundle);
    if (units == 0) return;
    if (wide) {
      CopyBundle<uint4>(p, place, units);
    } else {
      CopyBundle<uint32_t>(p, place, units);
    }
    __syncwarp();  // every lane has what it reads of the place
    if (threadIdx.x % kWarp == 0) StoreReleaseSystem(&p.words[place].value, 0);
  }
}

bool IsMultiple(const TakeRingParams& p, uintptr_t of) {
  const uintptr_t bits =
      reinterpret_cast<uintptr_t>(p.units) | reinterpret_cast<uintptr_t>(p.target) |
      static_cast<uintptr_t>(p.target_pitch | p.place_bytes | p.part_pitch | p.unit_bytes);
  return bits % of == 0;
}

}  // namespace

cudaError_t LaunchTakeRing(const TakeRingParams& p, cudaStream_t stream) {
  if (p.workers < 1 || p.workers > kMostRingWorkers || p.depth < 1 || p.unit_bytes <= 0 ||
      p.parts < 1 || p.max_workers < 0 || !IsMultiple(p, sizeof(uint32_t))) {
    return cudaErrorInvalidValue;
  }
  const int allowed = p.max_workers > 0 ? p.max_workers : kBlocks;
  const int blocks = std::max(allowed, (p.workers + kWarps - 1) / kWarps);
  return LaunchKernel(TakeRingKernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
                      stream, p, IsMultiple(p, sizeof(uint4)));
}

}  // namespace sluice::kernels::cuda
