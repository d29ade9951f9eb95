// Decode attention's second kernel: it combines the results of (bundle, KV head)s that several
// blocks of the first kernel shared.
#pragma once

#include "kernels/cuda/attention/attention_plan.cuh"
#include "kernels/cuda/common/launch.cuh"

namespace sluice::kernels::cuda {

// Warps of a block, for up to `tiles` tiles of 8 query heads of a bundle and a KV head.
template <int tiles>
inline constexpr int kCombineWarps = 16 * tiles;

// Writes element `d` of the result of query head `head`, of those that the bundle from row
// `first_row` on has for a KV head.
__device__ inline void WriteResult(const AttentionParams& p, int first_row, int kv_head, int head,
                                   int d, const Softmax& softmax, float o) {
  const int group = p.heads / p.cache.kv_heads, row = head / group;
  const int64_t item = int64_t{first_row + row} * p.heads + kv_head * group + (head - row * group);
  const float value = o / softmax.l;
  if (p.out_type == DType::kFloat32) {
    StoreAs(static_cast<float*>(p.out) + item * p.cache.head_dim + d, value);
  } else {
    StoreAs(static_cast<__nv_bfloat16*>(p.out) + item * p.cache.head_dim + d, value);
  }
  if (d == 0 && p.lse != nullptr) p.lse[item] = NaturalLse(softmax);
}

// Folds the partial results that the blocks of DecodeKernel left in `partial`. The grid has as
// many blocks as DecodeKernel's; the second of the blocks that share a (bundle, KV head) combines
// it. Its warps take a query head each and, if there are fewer heads than warps, every `parts`-th
// group of splits.
template <int dim, int tiles>
__global__ void __launch_bounds__(32 * kCombineWarps<tiles>)
    CombineKernel(const __grid_constant__ AttentionParams p, DecodeShape shape) {
  __shared__ DecodePlan plan;
  constexpr int kWarps = kCombineWarps<tiles>;
  __shared__ float group_o[kWarps][dim];
  __shared__ Softmax group_state[kWarps];
  constexpr int kLaneElements = dim / 32;
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  LetNextKernelStart();
  MakePlan(p, shape, plan);
  const WorkRange range(plan, p, shape, blocks);
  const int begin = range.EvenBegin(block);
  int row = 0, first = 0;
  const bool shared_row = [&] {
    if (range.whole() || begin == range.EvenBegin(block + 1)) return false;
    row = range.RowOf(begin);
    const int splits = range.Splits(row), unit = begin - range.FirstUnit(row);
    first = begin - unit % splits;
    return first < begin && range.Owner(begin - 1) == range.Owner(first);
  }();
  const int splits = shared_row ? range.Splits(row) : 0;
  const int groups = (splits + kGroupSplits - 1) / kGroupSplits;
  const int group = p.heads / p.cache.kv_heads, entry_heads = group * shape.bundle_rows;
  const int heads = shared_row ? group * range.Rows(row) : group;  // at most 8 * tiles
  const int parts = kWarps / heads, head = warp % heads, part = warp / heads;

  // Entries of this warp's group: one entry, or one for each split.
  int entries[kGroupSplits];
  int count = 0;
  const auto locate = [&](int number) {
    count = min(kGroupSplits, splits - number * kGroupSplits);
#pragma unroll
    for (int s = 0; s < kGroupSplits; ++s) {
      entries[s] = s > 0 ? entries[0] : 0;
      if (s >= count) continue;
      const int split = number * kGroupSplits + s, owner = range.Owner(first + split);
      const int begins = range.EvenBegin(owner);
      const Fragment fragment = {max(begins - first, 0),
                                 min(range.EvenBegin(owner + 1) - first, splits), splits};
      const bool in_group = fragment.HasGroup(number);
      if (in_group) count = 1;
      entries[s] = (2 * owner + (begins < first ? 1 : 0)) * shape.fragment_entries +
                   (in_group ? number : fragment.SplitEntry(split));
    }
  };
  if (part < parts && part < groups) locate(part);
  WaitForPriorKernels();
  if (!shared_row) return;

  Softmax total = {NegativeInfinity(), 0.0f};
  float total_o[kLaneElements] = {};
  for (int base = 0; base < groups; base += parts) {
    const int number = base + part;
    if (part < parts && number < groups) {
      if (base > 0) locate(number);
      // All loads start before the first fold, so that their latencies overlap. Loads past
      // `count` repeat the first one and are dropped.
      Softmax from[kGroupSplits];
      float from_o[kGroupSplits][kLaneElements];
#pragma unroll
      for (int s = 0; s < kGroupSplits; ++s) {
        const float* entry = p.partial + entries[s] * EntryFloats(entry_heads, dim);
        from[s] = {entry[entry_heads * dim + head], entry[entry_heads * (dim + 1) + head]};
#pragma unroll
        for (int i = 0; i < kLaneElements; ++i) from_o[s][i] = entry[head * dim + i * 32 + lane];
      }
      Softmax state = {NegativeInfinity(), 0.0f};
      float o[kLaneElements] = {};
#pragma unroll
      for (int s = 0; s < kGroupSplits; ++s) {
        Softmax folded = state;
        const FoldWeights weights = Fold</*may_be_empty=*/true>(folded, from[s]);
        state.m = s < count ? folded.m : state.m;
        state.l = s < count ? folded.l : state.l;
#pragma unroll
        for (int i = 0; i < kLaneElements; ++i) {
          o[i] = s < count ? Fold(weights, o[i], from_o[s][i]) : o[i];
        }
      }
      if (lane == 0) group_state[warp] = state;
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i) group_o[warp][i * 32 + lane] = o[i];
    }
    __syncthreads();
    for (int g = 0; part == 0 && g < min(parts, groups - base); ++g) {
      const int w = g * heads + head;
      const FoldWeights weights = Fold</*may_be_empty=*/true>(total, group_state[w]);
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i) {
        total_o[i] = Fold(weights, total_o[i], group_o[w][i * 32 + lane]);
      }
    }
    __syncthreads();
  }
  if (part != 0) return;
  const int kv_head = (first - range.FirstUnit(row)) / splits;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    WriteResult(p, row, kv_head, head, i * 32 + lane, total, total_o[i]);
  }
}

}  // namespace sluice::kernels::cuda
