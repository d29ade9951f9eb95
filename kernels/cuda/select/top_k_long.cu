// TopK of long lists: a cluster of up to 8 thread blocks takes a list, a run of it each. Scores
// are read once and become integers in shared memory. Narrowing usually leaves few of them
// (top_k_narrow.cuh). If more than 2,048 are wanted, or too many scores are alike, the cluster
// finds the last chosen one digit by digit (select.cuh). Only scores for which a block has no
// room are read again. Runners-up are the best of those that narrowing has left and choosing has
// not taken; without narrowing there are none.
//
// The kernel moves 4 bytes a unit, from L2 if they were just written: 512 KB a list of 128K, 17
// MB of 32 lists, 4 us at the rate of HBM. Its time is latency: of loads, and of three barriers
// of the cluster.
#include "kernels/cuda/select/top_k.h"

#include "kernels/cuda/common/float_keys.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/select/top_k_narrow.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr int kThreads = kNarrowThreads;
constexpr int kBlocksPerSm = 2;
constexpr int kMaxBlocks = 8;       // blocks of a cluster, on any device
constexpr int kKeptScores = 20480;  // scores of a block
constexpr int kLeastShare = 2048;   // scores of a block, if there is a choice
constexpr int kAtOnce = 16;         // loads of a thread under way

constexpr int kKeysAt = (sizeof(NarrowShared) + 15) / 16 * 16;
constexpr int SharedBytes(int kept) { return kKeysAt + 4 * kept; }

struct ScoreKeys {
  const float* scores;  // scores of this block's units
  const uint32_t* kept;
  int kept_count;
  int count;
  uint32_t limit;  // keys past it are never chosen

  __device__ __forceinline__ uint32_t At(int i) const {
    const uint32_t key = i < kept_count ? kept[i] : RankKey(scores[i]);
    return key <= limit ? key : kNeverSelected;
  }
};

// Puts the first `count` scores into shared memory, and the bests of this thread's scores by
// their number, modulo kMaxGroups, into `best`.
__device__ __forceinline__ void KeepKeys(const float* scores, int count, uint32_t* kept,
                                         uint32_t (&best)[kMaxGroups]) {
#pragma unroll
  for (int i = 0; i < kMaxGroups; ++i) best[i] = kNeverSelected;
  for (int from = static_cast<int>(threadIdx.x); from < count; from += kAtOnce * kThreads) {
    float loaded[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      loaded[i] = from + i * kThreads < count ? scores[from + i * kThreads] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (from + i * kThreads >= count) continue;
      const uint32_t key = RankKey(loaded[i]);
      kept[from + i * kThreads] = key;
      best[i % kMaxGroups] = min(best[i % kMaxGroups], key);
    }
  }
}

// Returns the key of the largest score of all minus the margin.
__device__ uint32_t LimitOf(uint32_t mine, float margin, int blocks, NarrowShared& shared) {
  mine = __reduce_min_sync(0xFFFFFFFFu, mine);
  if (threadIdx.x % 32 == 0) atomicMin(&shared.told[0], mine);
  MeetBlocks(blocks);
  uint32_t best = shared.told[0];
  for (int block = 0; blocks > 1 && block < blocks; ++block) {
    best = min(best, ReadBlock(shared.told, block, blocks).x);
  }
  return ~KeyOf(FloatOf(~best) - margin);
}

// Grid: lists * blocks.
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    LongTopKKernel(const __grid_constant__ TopKParams p, int blocks, int room) {
  extern __shared__ __align__(16) unsigned char memory[];
  NarrowShared& shared = *reinterpret_cast<NarrowShared*>(memory);
  uint32_t* const kept = reinterpret_cast<uint32_t*>(memory + kKeysAt);
  const int thread = static_cast<int>(threadIdx.x);
  const int list = static_cast<int>(blockIdx.x) / blocks, row = list / p.kv_heads;
  const int rank = static_cast<int>(blockIdx.x) - list * blocks;
  for (int i = thread; i < 3 * kSelectBins; i += kThreads) (&shared.select.bins[0][0])[i] = 0;
  if (thread == 0) {
    shared.told[0] = shared.ranges[0][0] = shared.ranges[1][0] = kNeverSelected;
    shared.ranges[0][1] = shared.ranges[1][1] = 0;
  }
  WaitForPriorKernels();
  LetNextKernelStart();
  if (!IsWanted(p, list, row)) {
    if (thread == 0 && rank == 0) {
      p.selected.counts[list] = 0;
      if (p.runners_up.units != nullptr) p.runners_up.counts[list] = 0;
    }
    return;
  }
  __syncthreads();
  // The units among which scores choose, [begin, end), `wanted` of them.
  const int units = p.positions[row] / p.unit_tokens + 1;
  const int begin = min(p.first_units, units), end = max(begin, units - p.last_units);
  const int candidates = end - begin, wanted = KOfRow(p, units) - begin - (units - end);
  const float* const scores = p.scores + list * p.score_stride;
  int32_t* const out = p.selected.units + int64_t{list} * p.selected.capacity;
  const bool is_last = rank == blocks - 1;
  int chosen = 0;  // of all blocks; the last block's is right
  int runners_up = 0;
  if (isinf(p.margin) && candidates <= wanted) {
    for (int i = rank * kThreads + thread; i < candidates; i += blocks * kThreads) {
      out[begin + i] = begin + i;
    }
    chosen = candidates;
  } else if (wanted > 0 && candidates > 0) {
    const int share = (candidates + 32 * blocks - 1) / (32 * blocks) * 32;
    const int first = min(rank * share, candidates), count = min(share, candidates - first);
    ScoreKeys keys = {scores + begin + first, kept, min(count, room), count, kNeverSelected};
    uint32_t best[kMaxGroups];
    KeepKeys(keys.scores, keys.kept_count, kept, best);
    if (!isinf(p.margin)) {
      uint32_t least = best[0];
      for (int i = 1; i < kMaxGroups; ++i) least = min(least, best[i]);
      for (int i = keys.kept_count + thread; i < count; i += kThreads) {
        least = min(least, RankKey(keys.scores[i]));
      }
      for (int i = thread; i < begin; i += kThreads) least = min(least, RankKey(scores[i]));
      for (int i = end + thread; i < units; i += kThreads) least = min(least, RankKey(scores[i]));
      keys.limit = LimitOf(least, p.margin, blocks, shared);
    }
    __syncthreads();
    int32_t* const to = out + begin;
    const int from = begin + first;
    bool narrowed = false;
    if (wanted <= kMaxNarrowWanted && share <= room) {
      Narrowing narrowing(shared, kept, count, keys.limit, wanted, blocks, rank);
      if (candidates > kMaxNarrowed) narrowing.Limit(best);
      narrowed = narrowing.Gather();
      if (narrowed) {
        if (blocks > 1) LeaveCluster();  // no block reads others any more
        chosen = narrowing.Choose(static_cast<uint32_t>(wanted),
                                  [&](int number, int i) { to[number] = from + i; });
        if (p.runners_up.units != nullptr && p.runners_up.capacity > 0) {
          int32_t* const next = p.runners_up.units + int64_t{list} * p.runners_up.capacity;
          runners_up = narrowing.Choose(static_cast<uint32_t>(p.runners_up.capacity),
                                        [&](int number, int i) { next[number] = from + i; });
        }
      } else {
        for (int i = thread; i < 2 * kSelectBins; i += kThreads) (&shared.select.bins[1][0])[i] = 0;
        __syncthreads();
      }
    }
    if (!narrowed) {
      uint32_t lacking;
      const SelectCut cut = FindSelectCut<kThreads>(keys, 32, static_cast<uint32_t>(wanted), blocks,
                                                    rank, shared.select, &lacking);
      if (blocks > 1) LeaveCluster();
      chosen = static_cast<int>(VisitSelected<kThreads>(
          keys, cut, shared.select, [&](int i, uint32_t number) { to[number] = from + i; }));
    }
    if (blocks > 1) AwaitCluster();
  }
  if (rank == 0) {
    for (int i = thread; i < begin; i += kThreads) out[i] = i;
  }
  if (!is_last) return;
  for (int i = thread; i < units - end; i += kThreads) out[begin + chosen + i] = end + i;
  if (thread == 0) {
    p.selected.counts[list] = begin + chosen + units - end;
    if (p.runners_up.units != nullptr) p.runners_up.counts[list] = runners_up;
  }
}

}  // namespace

cudaError_t LaunchLongTopK(const TopKParams& p, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  static const cudaError_t roomy = cudaFuncSetAttribute(
      LongTopKKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SharedBytes(kKeptScores));
  if (error == cudaSuccess) error = roomy;
  if (error != cudaSuccess) return error;
  // As many blocks as run at a time, unless the scores would not fit in their shared memory.
  const int64_t lists = int64_t{p.rows} * p.kv_heads;
  int blocks = kMaxBlocks;
  while (blocks > 1 && (lists * blocks > kBlocksPerSm * processors ||
                        p.score_stride < int64_t{kLeastShare} * blocks)) {
    blocks /= 2;
  }
  while (blocks < kMaxBlocks && p.score_stride > int64_t{kKeptScores} * blocks) blocks *= 2;
  const int64_t share = (p.score_stride + 32 * blocks - 1) / (32 * blocks) * 32;
  const int room = static_cast<int>(min(max(share, int64_t{kMaxNarrowed}), int64_t{kKeptScores}));
  const auto shared = static_cast<size_t>(SharedBytes(room));
  const dim3 grid(static_cast<unsigned>(lists * blocks));
  if (blocks == 1) {
    return LaunchKernel(LongTopKKernel, grid, dim3(kThreads), shared, stream, p, blocks, room);
  }
  return LaunchClusters(LongTopKKernel, grid, dim3(kThreads), dim3(static_cast<unsigned>(blocks)),
                        shared, stream, p, blocks, room);
}

}  // namespace sluice::kernels::cuda
