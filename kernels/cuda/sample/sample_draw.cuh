// The draw of a token from a row's logits: top_k, top_p and min_p cut the row, then a walk in
// order of id finds the token.
#pragma once

#include <cstdint>

#include "kernels/cuda/sample/sample_list.cuh"
#include "kernels/cuda/sample/sample_select.cuh"

namespace sluice::kernels::cuda {

// Shared memory of a block. Its slice of the logits follows.
struct alignas(16) SampleMemory {
  SelectMemory select;
  ClusterExchange exchange;
  SamplingSlot slot;
  uint64_t warp_sums[kSampleWarps];
  Cut cut;
  int32_t own_candidates;
  int32_t token;
  // Used in block 0: the best of the raw logits, in no order.
  int32_t alternatives;
  Candidate alternative[kMaxTopLogprobs];
};
// Returns the sum over the block.
__device__ __forceinline__ uint64_t BlockSum(SampleMemory& memory, uint64_t value) {
  value = SumThroughLane(value);
  __syncthreads();
  if (threadIdx.x % kWarpSize == kWarpSize - 1) memory.warp_sums[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kSampleWarps; ++i) sum += memory.warp_sums[i];
  return sum;
}

// The rule by which a row is drawn, from its slot.
struct DrawRule {
  uint64_t least;  // tokens with a lower weight are out (min_p)
  double top_p;
  double u;
  int top_k;  // 0 if off

  // Returns the weight that the most probable tokens must reach together, out of `total`.
  __device__ uint64_t Goal(uint64_t total) const {
    const auto goal = static_cast<uint64_t>(ceil(top_p * static_cast<double>(total)));
    return min(max(goal, uint64_t{1}), total);
  }
  // Returns the draw as a weight: the drawn token is the first in order of id with which the sum
  // exceeds it. The product may be rounded up to the total; a token is found all the same.
  __device__ uint64_t Target(uint64_t total) const {
    return min(static_cast<uint64_t>(u * static_cast<double>(total)), total - 1);
  }
};

// Gives this thread the candidate of its pair of threads, and writes the weights to block 0's
// list.
__device__ __forceinline__ Candidate Weigh(Candidate* list, int count, const SumWeights& weights) {
  const int i = threadIdx.x / 2;
  Candidate mine = {};
  if (i < count) {
    mine = list[i];
    mine.weight = weights(mine.logit);
  }
  __syncthreads();
  if (i < count && threadIdx.x % 2 == 0) list[i].weight = mine.weight;
  __syncthreads();
  return mine;
}

// The number and the total weight of the candidates better than `mine`.
struct Better {
  int count;
  uint64_t weight;
};
__device__ __forceinline__ Better BetterThan(const Candidate& mine, const Candidate* list,
                                             int count) {
  Better better = {0, 0};
#pragma unroll 4
  for (int j = threadIdx.x % 2; j < count; j += 2) {
    const Candidate other = list[j];
    const bool is_better = IsBetter(other, mine);
    better.count += is_better ? 1 : 0;
    better.weight += is_better ? other.weight : 0;
  }
  better.count += __shfl_xor_sync(kAllLanes, better.count, 1);
  better.weight += __shfl_xor_sync(kAllLanes, better.weight, 1);
  return better;
}

// Finds where the weights of the candidates, after `before` of better tokens, reach the goal.
// Block 0 finds it for all blocks.
__device__ __forceinline__ Cut CutFromList(Cluster& cluster, SampleMemory& memory, int count,
                                           const SumWeights& weights, uint64_t before,
                                           uint64_t goal) {
  if (cluster.rank() == 0) {
    Candidate* list = ListOf(memory.select).all;
    const Candidate mine = Weigh(list, count, weights);
    before += BetterThan(mine, list, count).weight;
    const bool is_cut = threadIdx.x / 2 < count && before < goal && goal <= before + mine.weight;
    if (is_cut && threadIdx.x % 2 == 0) {
      for (int block = 0; block < kClusterBlocks; ++block) {
        *cluster.At(&memory.cut, block) = {mine.logit, mine.id};
      }
    }
  }
  cluster.Sync();
  return memory.cut;
}

// Draws from `count` candidates in block 0. All tokens that the cuts may leave are among them.
// `goal` is that of top_p, or 0 if it follows from the tokens that top_k leaves. Two threads work
// on each candidate.
__device__ __forceinline__ int DrawFromList(SampleMemory& memory, int count, const DrawRule& rule,
                                            const SumWeights& weights, uint64_t goal) {
  Candidate* list = ListOf(memory.select).all;
  const int half = threadIdx.x % 2;
  const int i = threadIdx.x / 2;
  const Candidate mine = Weigh(list, count, weights);
  const Better better = BetterThan(mine, list, count);
  bool kept = i < count && (rule.top_k == 0 || better.count < rule.top_k);
  if (goal == 0) goal = rule.Goal(BlockSum(memory, kept && half == 0 ? mine.weight : 0));
  kept = kept && better.weight < goal && mine.weight >= rule.least;
  __syncthreads();
  if (i < count && half == 0) list[i].weight = kept ? mine.weight : 0;
  const uint64_t target = rule.Target(BlockSum(memory, kept && half == 0 ? mine.weight : 0));
  uint64_t lower = 0;
  if (kept) {
#pragma unroll 4
    for (int j = half; j < count; j += 2) {
      const Candidate other = list[j];
      lower += other.id < mine.id ? other.weight : 0;
    }
  }
  lower += __shfl_xor_sync(kAllLanes, lower, 1);
  if (kept && half == 0 && lower <= target && target < lower + mine.weight) {
    memory.token = mine.id;
  }
  __syncthreads();
  return memory.token;
}

// Draws from all tokens that `cut` keeps, by all blocks. Block 0 gets the token.
__device__ __forceinline__ int DrawFromSlices(Cluster& cluster, SampleMemory& memory,
                                              const Slice& slice, Cut cut, const DrawRule& rule,
                                              const SumWeights& weights) {
  const auto masked = [&](float l, int i, uint64_t weight) {
    return cut.Keeps(l, slice.begin + i) && weight >= rule.least ? weight : 0;
  };
  const Slice::Run run = slice.Mine();
  uint64_t sum = 0;
  for (int i = run.first; i < run.last; i += 4) {
    float l[4];
    bool any = false;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      l[j] = i + j < run.last ? slice.logits[i + j] : -INFINITY;
      any = any || cut.Keeps(l[j], slice.begin + i + j);
    }
    if (!any) continue;
    uint64_t weight[4];  // all four are computed side by side
#pragma unroll
    for (int j = 0; j < 4; ++j) weight[j] = weights(l[j]);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += masked(l[j], i + j, weight[j]);
  }
  const Cluster::Scan scan = cluster.Sum(sum);
  const uint64_t target = rule.Target(scan.total);
  const uint32_t owner =
      __ballot_sync(kAllLanes, scan.before <= target && target < scan.before + sum);
  if (owner != 0) {  // this warp has the run with the token, and walks it together
    const int lane = __ffs(static_cast<int>(owner)) - 1;
    const int last = __shfl_sync(kAllLanes, run.last, lane);
    uint64_t reached = __shfl_sync(kAllLanes, scan.before, lane);
    int i = __shfl_sync(kAllLanes, run.first, lane) + static_cast<int>(threadIdx.x % kWarpSize);
    for (;; i += kWarpSize) {
      const float l = i < last ? slice.logits[i] : -INFINITY;
      const uint64_t through = reached + SumThroughLane(i < last ? masked(l, i, weights(l)) : 0);
      const uint32_t past = __ballot_sync(kAllLanes, through > target);
      if (past != 0) {
        if (static_cast<int>(threadIdx.x % kWarpSize) == __ffs(static_cast<int>(past)) - 1) {
          *cluster.At(&memory.token, 0) = slice.begin + i;
        }
        break;
      }
      reached = __shfl_sync(kAllLanes, through, kWarpSize - 1);
    }
  }
  cluster.Sync();
  return memory.token;
}

// Makes one draw: top_k, top_p and min_p cut the row, then a walk in order of id finds the token.
// `mine` is the logit of this thread's best token. Block 0 gets the token.
__device__ __forceinline__ int Draw(Cluster& cluster, SampleMemory& memory, const Slice& slice,
                                    const SamplingSlot& s, int output_index, int vocab,
                                    float largest, float mine) {
  const DrawRule rule = {static_cast<uint64_t>(ceil(static_cast<double>(s.min_p) *
                                                    static_cast<double>(kWeightOfBest))),
                         s.top_p, UniformFromSeed(s.seed, static_cast<uint64_t>(output_index)),
                         s.top_k < vocab ? s.top_k : 0};
  const double share_of_light = 0.5 * (1.0 - rule.top_p) / vocab;
  const SumWeights weights(
      largest, 1.0 / static_cast<double>(s.temperature),
      // Tokens of lower weight weigh together less than half of the share that top_p leaves out.
      static_cast<uint64_t>(share_of_light * static_cast<double>(kWeightOfBest)));
  Cut cut = KeepAll();
  if (rule.top_k > 0) {
    if (rule.top_k <= kMaxCandidates) {
      const int count = GatherBest(cluster, memory.select, memory.own_candidates, slice, largest,
                                   mine, rule.top_k);
      if (count >= 0) {
        return cluster.rank() == 0 ? DrawFromList(memory, count, rule, weights, 0) : -1;
      }
    }
    CutSearch<CountTokens> search(cluster, memory.select, slice, cut, CountTokens());
    while (!search.done()) {
      search.Narrow([&](uint64_t) { return static_cast<uint64_t>(rule.top_k); });
    }
    cut = search.Finish();
  }
  if (rule.top_p < 1) {
    CutSearch<SumWeights> search(cluster, memory.select, slice, cut, weights);
    const auto goal = [&](uint64_t total) { return rule.Goal(total); };
    search.Narrow(goal);
    const int count = GatherCandidates(cluster, memory.select, memory.own_candidates, slice,
                                       [&](float l, int id) { return search.MayKeep(l, id); });
    if (count >= 0) {
      DrawRule rest = rule;
      rest.top_k = 0;
      return cluster.rank() == 0 ? DrawFromList(memory, count, rest, weights, search.goal()) : -1;
    }
    const int left = GatherCandidates(cluster, memory.select, memory.own_candidates, slice,
                                      [&](float l, int id) { return search.IsLeft(l, id); });
    if (left >= 0) {
      cut = CutFromList(cluster, memory, left, weights, search.before(), search.goal());
    } else {
      search.Compact();
      while (!search.done()) search.Narrow(goal);
      cut = search.Finish();
    }
  }
  return DrawFromSlices(cluster, memory, slice, cut, rule, weights);
}

}  // namespace sluice::kernels::cuda
