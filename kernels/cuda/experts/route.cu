// The router of experts, the list of each expert's pairs, and the sum of the experts' results.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/common/block_scan.cuh"
#include "kernels/cuda/common/float_keys.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/launch.h"
#include "kernels/cuda/common/vectors.cuh"
#include "kernels/cuda/experts/exchange.h"

namespace sluice::kernels::cuda {
namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kWarpSize = 32;
constexpr int kRowsPerBlock = 4;  // one warp each
constexpr int kFewExperts = 256;  // experts of a router that takes the small instance
constexpr int kMaxExperts = 512;
constexpr int kMaxChosen = kWarpSize;  // one choice a lane
constexpr int kMaxPairThreads = 1024;

// A row's scores in shared memory. A word is left out after every 32, so that lanes that read
// groups of 32 experts meet in few banks.
struct RowScores {
  float choice[kMaxExperts + kMaxExperts / kWarpSize];  // s + bias
  uint32_t groups[kMaxExperts];                         // keys of the groups' two largest
  bool stays[kMaxExperts];                              // whether each group stays
  static __device__ __forceinline__ int At(int expert) { return expert + expert / kWarpSize; }
};

struct TopTwo {
  float first, second;
  __device__ __forceinline__ void Add(float c) {
    second = fmaxf(second, fminf(first, c));
    first = fmaxf(first, c);
  }
};

// Computes whether each group of `size` experts is among the top_groups by the sum of its two
// largest choices (by its only one if size is 1). The warp's lanes are divided evenly among the
// groups.
__device__ __forceinline__ void RankGroups(const RouteParams& p, RowScores& scores, int size) {
  const int lane = threadIdx.x % kWarpSize;
  int sharing = 1;
  while (2 * sharing * p.groups <= kWarpSize) sharing *= 2;
  const int part = lane % sharing;
  for (int first = 0; first < p.groups; first += kWarpSize / sharing) {
    const int group = first + lane / sharing;
    TopTwo top = {-INFINITY, -INFINITY};
    if (group < p.groups) {
#pragma unroll 4
      for (int i = part; i < size; i += sharing) {
        top.Add(scores.choice[RowScores::At(group * size + i)]);
      }
    }
    for (int step = 1; step < sharing; step *= 2) {
      const TopTwo other = {__shfl_xor_sync(kAll, top.first, step),
                            __shfl_xor_sync(kAll, top.second, step)};
      top.Add(other.first);
      top.Add(other.second);
    }
    if (group < p.groups && part == 0) {
      scores.groups[group] = KeyOf(size == 1 ? top.first : top.first + top.second);
    }
  }
  __syncwarp();
  for (int group = lane; group < p.groups; group += kWarpSize) {
    const uint32_t mine = scores.groups[group];
    int before = 0;
    for (int g = 0; g < p.groups; ++g) {
      const uint32_t key = scores.groups[g];
      before += key > mine || (key == mine && g < group) ? 1 : 0;
    }
    scores.stays[group] = before < p.top_groups;
  }
  __syncwarp();
}

// One warp computes a row, with expert lane + 32 j in a lane's j-th register. A row of 256
// experts is 1 KB, so the time is all latency: two reductions of a warp for each expert chosen.
// Measured (H200, 256 experts in 8 groups, 8 chosen, including the pairs' kernel, in a graph):
// 5.3 us at 1 row, 6.0 at 64, 14 at 512.
template <int kPerLane>
__global__ void __launch_bounds__(kRowsPerBlock* kWarpSize) RouteKernel(RouteParams p) {
  __shared__ RowScores all_scores[kRowsPerBlock];
  LetNextKernelStart();
  const int64_t row = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  RowScores& scores = all_scores[threadIdx.x / kWarpSize];
  float bias[kPerLane], s[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int e = lane + j * kWarpSize;
    bias[j] = p.bias != nullptr && e < p.experts ? p.bias[e] : 0.0f;
  }
  WaitForPriorKernels();
  if (row >= p.rows) return;  // true for the whole warp
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int e = lane + j * kWarpSize;
    s[j] = e < p.experts ? p.logits[row * p.experts + e] : 0;
  }
  bool is_number = p.slots[row] >= 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int e = lane + j * kWarpSize;
    is_number = is_number && !isnan(s[j]);
    s[j] = 1.0f / (1.0f + expf(-s[j]));
    // A NaN of a bias counts as the least.
    if (e < p.experts) scores.choice[RowScores::At(e)] = fmaxf(s[j] + bias[j], -INFINITY);
  }
  if (!__all_sync(kAll, is_number)) {
    if (lane < p.k) {
      p.chosen[row * p.k + lane] = -1;
      p.weights[row * p.k + lane] = 0;
    }
    return;
  }
  __syncwarp();
  const int group_size = p.experts / p.groups;
  RankGroups(p, scores, group_size);

  uint32_t keys[kPerLane];  // 0 means not to be chosen: it is below the key of every number
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int e = lane + j * kWarpSize;
    keys[j] = 0;
    if (e < p.experts && scores.stays[e / group_size]) {
      keys[j] = KeyOf(scores.choice[RowScores::At(e)]);
    }
  }
  int mine = kMaxExperts;  // the lane-th choice, and its s
  float weight = 0;
  for (int i = 0; i < p.k; ++i) {
    uint32_t best = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) best = max(best, keys[j]);
    best = __reduce_max_sync(kAll, best);
    unsigned expert = kMaxExperts;
    float of_expert = 0;
#pragma unroll
    for (int j = kPerLane - 1; j >= 0; --j) {
      if (keys[j] != best) continue;
      expert = lane + j * kWarpSize;
      of_expert = s[j];
    }
    const unsigned lowest = __reduce_min_sync(kAll, expert);
    of_expert = __shfl_sync(kAll, of_expert, lowest % kWarpSize);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (lowest == static_cast<unsigned>(lane + j * kWarpSize)) keys[j] = 0;
    }
    if (lane == i) {
      mine = static_cast<int>(lowest);
      weight = of_expert;
    }
  }
  // Choices are written in ascending order: a choice's index is the number of choices below it.
  int place = 0;
  for (int i = 0; i < p.k; ++i) {
    if (__shfl_sync(kAll, mine, i) < mine) ++place;
  }
  float sum = 0;
  for (int i = 0; i < p.k; ++i) {
    const unsigned at = __ballot_sync(kAll, lane < p.k && place == i);
    sum += __shfl_sync(kAll, weight, __ffs(static_cast<int>(at)) - 1);
  }
  if (lane >= p.k) return;
  if (p.normalise) weight /= sum + 1e-20f;
  p.chosen[row * p.k + place] = mine;
  p.weights[row * p.k + place] = weight * p.scaling;
}

// One block sorts the pairs by expert, as many at a time as it has threads, and keeps their
// order. Pairs of a warp that have an expert in common find their order by __match_any_sync;
// pairs of different warps use the warps' counts. If one round is not enough, all pairs are
// counted first. At 64 rows of 8 choices it moves 2 KB in and out: the time is latency.
__global__ void __launch_bounds__(kMaxPairThreads) RoutePairsKernel(RouteParams p) {
  // Counts of a round's pairs by warp: a row for each warp, with the number of experts rounded
  // up.
  __shared__ __align__(16) uint16_t counts[kMaxPairThreads / kWarpSize][kMaxExperts];
  __shared__ int32_t next[kMaxExperts];  // counts of all pairs, then the index of the next one
  __shared__ uint32_t totals[kMaxPairThreads / kWarpSize];
  LetNextKernelStart();
  const int t = threadIdx.x, threads = blockDim.x, lane = t % kWarpSize, warp = t / kWarpSize;
  const int64_t pairs = int64_t{p.rows} * p.k;
  const bool one_round = pairs <= threads;
  // vectors of a warp's counts
  constexpr int kVectors = kMaxExperts * sizeof(uint16_t) / sizeof(uint4);
  const int warps = threads / kWarpSize;
  const auto clear = [&] {
    for (int i = t; i < warps * kVectors; i += threads) {
      reinterpret_cast<uint4*>(counts)[i] = uint4{0, 0, 0, 0};
    }
  };
  clear();
  if (t < p.experts) next[t] = 0;
  WaitForPriorKernels();
  int expert = t < pairs ? p.chosen[t] : -1;
  __syncthreads();
  if (!one_round) {
    for (int64_t pair = t; pair < pairs; pair += threads) {
      const int e = p.chosen[pair];
      if (e >= 0) atomicAdd(&next[e], 1);
    }
  }
  for (int64_t first = 0; first < pairs || first == 0; first += threads) {
    if (first > 0) {
      clear();
      expert = first + t < pairs ? p.chosen[first + t] : -1;
      __syncthreads();
    }
    const unsigned peers = __match_any_sync(kAll, expert);
    const int before = __popc(peers & ((1u << lane) - 1));
    if (expert >= 0 && before == 0) counts[warp][expert] = static_cast<uint16_t>(__popc(peers));
    __syncthreads();
    int of_round = 0;
    if (t < p.experts) {  // counts become the counts of the warps before
#pragma unroll 8
      for (int w = 0; w < warps; ++w) {
        const int here = counts[w][t];
        counts[w][t] = static_cast<uint16_t>(of_round);
        of_round += here;
      }
    }
    if (first == 0) {
      const uint32_t all = t >= p.experts ? 0 : one_round ? of_round : next[t];
      const BlockSum sum = ScanBlock(all, totals);
      if (t < p.experts) {
        next[t] = static_cast<int32_t>(sum.before);
        p.begins[t] = static_cast<int32_t>(sum.before);
      }
      if (t == 0) p.begins[p.experts] = static_cast<int32_t>(sum.total);
    }
    __syncthreads();
    if (expert >= 0) {
      p.pairs[next[expert] + counts[warp][expert] + before] = static_cast<int32_t>(first + t);
    }
    __syncthreads();
    if (t < p.experts) next[t] += of_round;
  }
}

constexpr int kCombineThreads = 256;
constexpr int kCombineTile = 4 * kCombineThreads;  // elements of a row per block
constexpr int kAtOnce = 8;                         // results of experts in flight together

// The grid is ceil(dim / kCombineTile) blocks for each row, one row behind the other. The kernel
// moves 4 bytes per element of each expert's result and 8 of the row: at k 8, dim 7168 and 64 rows
// 18 MB, 4 us of HBM, less the part that L2 still has. Measured (H200, launches one after the other
// in a graph): 1.8 us at 1 row, 4.4 at 64, 47 at 512.
__global__ void __launch_bounds__(kCombineThreads) CombineKernel(CombineParams p, bool aligned) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const unsigned tiles = (p.dim + kCombineTile - 1) / kCombineTile;
  const int64_t row = blockIdx.x / tiles;
  const int i = static_cast<int>(blockIdx.x % tiles) * kCombineTile + 4 * threadIdx.x;
  if (i >= p.dim) return;
  const int32_t* chosen = p.chosen + row * p.k;
  const float* weights = p.weights + row * p.k;
  float4 sum = {0, 0, 0, 0};
  for (int first = 0; first < p.k; first += kAtOnce) {
    float4 y[kAtOnce];
    float weight[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const bool counts = first + j < p.k && chosen[first + j] >= 0;
      weight[j] = counts ? weights[first + j] : 0;
      y[j] = {0, 0, 0, 0};
      if (counts) y[j] = Load4(p.y + (row * p.k + first + j) * p.dim, i, p.dim, aligned);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      sum = {fmaf(weight[j], y[j].x, sum.x), fmaf(weight[j], y[j].y, sum.y),
             fmaf(weight[j], y[j].z, sum.z), fmaf(weight[j], y[j].w, sum.w)};
    }
  }
  const float4 x = Load4(p.out + row * p.dim, i, p.dim, aligned);
  Store4(p.out, DType::kFloat32, row * p.dim, i, p.dim, aligned,
         {x.x + sum.x, x.y + sum.y, x.z + sum.z, x.w + sum.w});
}

}  // namespace

cudaError_t LaunchRoute(const RouteParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.experts < 1 || p.experts > kMaxExperts || p.groups < 1 ||
      p.experts % p.groups != 0 || p.top_groups < 1 || p.top_groups > p.groups || p.k < 1 ||
      p.k > kMaxChosen || p.k > p.experts / p.groups * p.top_groups) {
    return cudaErrorInvalidValue;
  }
  if (p.rows > 0) {
    const auto blocks = static_cast<unsigned>((p.rows + kRowsPerBlock - 1) / kRowsPerBlock);
    const cudaError_t error =
        LaunchKernel(p.experts <= kFewExperts ? RouteKernel<kFewExperts / kWarpSize>
                                              : RouteKernel<kMaxExperts / kWarpSize>,
                     blocks, kRowsPerBlock * kWarpSize, 0, stream, p);
    if (error != cudaSuccess) return error;
  }
  return LaunchRoutePairs(p, stream);
}

cudaError_t LaunchRoutePairs(const RouteParams& p, cudaStream_t stream) {
  if (p.experts < 1 || p.experts > kMaxExperts) return cudaErrorInvalidValue;
  // One thread for each expert, and for each pair as far as the block's limit allows.
  const int64_t threads = std::max<int64_t>(p.experts, int64_t{p.rows} * p.k);
  const auto whole = static_cast<unsigned>(
      std::min<int64_t>((threads + kWarpSize - 1) / kWarpSize * kWarpSize, kMaxPairThreads));
  return LaunchKernel(RoutePairsKernel, 1, whole, 0, stream, p);
}

cudaError_t LaunchCombine(const CombineParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.k < 0 || p.dim < 1) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  const bool aligned = p.dim % 4 == 0 && AreAligned(16, p.y, p.out);
  const int64_t blocks = int64_t{p.rows} * ((p.dim + kCombineTile - 1) / kCombineTile);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return LaunchKernel(CombineKernel, static_cast<unsigned>(blocks), kCombineThreads, 0, stream, p,
                      aligned);
}

}  // namespace sluice::kernels::cuda
