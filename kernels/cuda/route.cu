// The router of experts, the list of each expert's pairs, and the sum of what the experts made.
#include <cstdint>

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/float_keys.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/vectors.cuh"

namespace sluice::kernels::cuda {
namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int kWarpSize = 32;
constexpr int kRowsPerBlock = 4;                   // one warp each
constexpr int kMaxExperts = 512;                   // of a router
constexpr int kPerLane = kMaxExperts / kWarpSize;  // expert lane + 32 * j
constexpr int kMaxChosen = kWarpSize;              // one a lane
constexpr int kPairThreads = 1024;
constexpr int kPairWarps = kPairThreads / kWarpSize;
constexpr int kMaxRows = 65535;  // the grid's y has 16 bits

// A row's scores in shared memory. A word is left out after every 32: lanes that read groups of 32
// experts meet in no bank.
struct RowScores {
  float choice[kMaxExperts + kPerLane];  // s + bias
  float groups[kMaxExperts];             // the two largest of each group
  static __device__ __forceinline__ int At(int expert) { return expert + expert / kWarpSize; }
};

// The sum of the two largest of a group.
__device__ __forceinline__ float TopTwo(const RowScores& scores, int group, int size) {
  float first = -INFINITY, second = -INFINITY;
  for (int i = 0; i < size; ++i) {
    const float c = scores.choice[RowScores::At(group * size + i)];
    second = fmaxf(second, fminf(first, c));
    first = fmaxf(first, c);
  }
  return size == 1 ? first : first + second;
}

// Whether fewer than top_groups come before the group.
__device__ __forceinline__ bool Stays(const RouteParams& p, const RowScores& scores, int group) {
  const uint32_t mine = KeyOf(scores.groups[group]);
  int before = 0;
  for (int g = 0; g < p.groups; ++g) {
    const uint32_t key = KeyOf(scores.groups[g]);
    if (key > mine || (key == mine && g < group)) ++before;
  }
  return before < p.top_groups;
}

// One warp per row. A row of 256 experts is 1 KB, and all of this is latency: two reductions of a
// warp for each expert chosen.
__global__ void __launch_bounds__(kRowsPerBlock* kWarpSize) RouteKernel(RouteParams p) {
  __shared__ RowScores all_scores[kRowsPerBlock];
  LetNextKernelStart();
  const int64_t row = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  RowScores& scores = all_scores[threadIdx.x / kWarpSize];
  WaitForPriorKernels();
  if (row >= p.rows) return;  // of the whole warp
  float s[kPerLane];
  bool is_number = true;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int e = lane + j * kWarpSize;
    if (e >= p.experts) break;
    const float logit = p.logits[row * p.experts + e];
    is_number = is_number && !isnan(logit);
    s[j] = 1.0f / (1.0f + expf(-logit));
    scores.choice[RowScores::At(e)] = s[j] + (p.bias != nullptr ? p.bias[e] : 0.0f);
  }
  if (!__all_sync(kAll, is_number) || p.slots[row] < 0) {
    if (lane < p.k) {
      p.chosen[row * p.k + lane] = -1;
      p.weights[row * p.k + lane] = 0;
    }
    return;
  }
  __syncwarp();
  const int group_size = p.experts / p.groups;
  for (int g = lane; g < p.groups; g += kWarpSize) {
    scores.groups[g] = TopTwo(scores, g, group_size);
  }
  __syncwarp();

  // 0: not to be chosen, below the key of every number.
  uint32_t keys[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int e = lane + j * kWarpSize;
    keys[j] = 0;
    if (e < p.experts && Stays(p, scores, e / group_size)) {
      keys[j] = KeyOf(fmaxf(scores.choice[RowScores::At(e)], -INFINITY));  // a NaN is the least
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
#pragma unroll
    for (int j = kPerLane - 1; j >= 0; --j) {
      if (keys[j] == best) expert = lane + j * kWarpSize;
    }
    expert = __reduce_min_sync(kAll, expert);
    float chosen = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      if (expert != static_cast<unsigned>(lane + j * kWarpSize)) continue;
      keys[j] = 0;
      chosen = s[j];
    }
    chosen = __shfl_sync(kAll, chosen, expert % kWarpSize);
    if (lane == i) {
      mine = static_cast<int>(expert);
      weight = chosen;
    }
  }
  // In ascending order: a lane's place is the number of choices below its own.
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

// One block sorts the pairs by expert, 1,024 at a time, keeping their order: those of a warp that
// have an expert in common know their order by __match_any_sync, those of other warps by the warps'
// counts. First all are counted, then placed. At 64 rows of 8 choices 2 KB in and out; latency.
__global__ void __launch_bounds__(kPairThreads) RoutePairsKernel(RouteParams p) {
  __shared__ uint16_t counts[kPairWarps][kMaxExperts];  // of this round's pairs
  __shared__ int32_t next[kMaxExperts];  // counts of all, then where the next one goes
  __shared__ uint32_t totals[kPairWarps];
  LetNextKernelStart();
  const int t = threadIdx.x, warp = t / kWarpSize, lane = t % kWarpSize;
  const int64_t pairs = int64_t{p.rows} * p.k;
  for (int e = t; e < p.experts; e += kPairThreads) next[e] = 0;
  WaitForPriorKernels();
  __syncthreads();
  for (int64_t pair = t; pair < pairs; pair += kPairThreads) {
    const int expert = p.chosen[pair];
    if (expert >= 0) atomicAdd(&next[expert], 1);
  }
  __syncthreads();
  const uint32_t count = t < p.experts ? next[t] : 0;
  const BlockSum sum = ScanBlock(count, totals);
  if (t < p.experts) {
    next[t] = static_cast<int32_t>(sum.before);
    p.begins[t] = static_cast<int32_t>(sum.before);
  }
  if (t == 0) p.begins[p.experts] = static_cast<int32_t>(sum.total);

  for (int64_t first = 0; first < pairs; first += kPairThreads) {
    for (int i = t; i < kPairWarps * p.experts; i += kPairThreads) {
      counts[i / p.experts][i % p.experts] = 0;
    }
    __syncthreads();
    const int64_t pair = first + t;
    const int expert = pair < pairs ? p.chosen[pair] : -1;
    const unsigned peers = __match_any_sync(kAll, expert);
    const int before = __popc(peers & ((1u << lane) - 1));
    if (expert >= 0 && before == 0) {
      counts[warp][expert] = static_cast<uint16_t>(__popc(peers));
    }
    __syncthreads();
    int of_round = 0;
    if (t < p.experts) {  // counts become those of the warps before
      for (int w = 0; w < kPairWarps; ++w) {
        const int here = counts[w][t];
        counts[w][t] = static_cast<uint16_t>(of_round);
        of_round += here;
      }
    }
    __syncthreads();
    if (expert >= 0) {
      p.pairs[next[expert] + counts[warp][expert] + before] = static_cast<int32_t>(pair);
    }
    __syncthreads();
    if (t < p.experts) next[t] += of_round;
  }
}

constexpr int kCombineThreads = 256;
constexpr int kCombineTile = 4 * kCombineThreads;  // elements of a row per block
constexpr int kAtOnce = 8;                         // results of experts on their way together

// grid (ceil(dim / kCombineTile), rows). Moves 4 bytes per element of each expert's result and 8 of
// the row: at k 8, dim 7168 and 64 rows 18 MB, 4 us of HBM, less what L2 still has.
__global__ void __launch_bounds__(kCombineThreads) CombineKernel(CombineParams p, bool aligned) {
  LetNextKernelStart();
  WaitForPriorKernels();
  const int64_t row = blockIdx.y;
  const int i = blockIdx.x * kCombineTile + 4 * threadIdx.x;
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
        LaunchKernel(RouteKernel, blocks, kRowsPerBlock * kWarpSize, 0, stream, p);
    if (error != cudaSuccess) return error;
  }
  return LaunchKernel(RoutePairsKernel, 1, kPairThreads, 0, stream, p);
}

cudaError_t LaunchCombine(const CombineParams& p, cudaStream_t stream) {
  if (p.rows < 0 || p.rows > kMaxRows || p.k < 0 || p.dim < 1) return cudaErrorInvalidValue;
  if (p.rows == 0) return cudaSuccess;
  const bool aligned = p.dim % 4 == 0 && AreAligned(16, p.y, p.out);
  const dim3 grid((p.dim + kCombineTile - 1) / kCombineTile, p.rows);
  return LaunchKernel(CombineKernel, grid, kCombineThreads, 0, stream, p, aligned);
}

}  // namespace sluice::kernels::cuda
