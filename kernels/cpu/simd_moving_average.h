// HGCA's moving average of attention weights for any path (`S`: see simd_math.h). Lists are split
// over workers. A weight is one fixed sequence of operations on its token and its heads.
#pragma once

#include "kernels/cpu/simd_scores.h"
#include "kernels/unit_list.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int kAverageTokens = 16;  // weights computed at a time

// Computes the group's reduced weights of `count` list tokens, whose keys are rows of the cache at
// `keys`.
template <class S>
void ReducedWeights(const MovingAverageParams& p, int64_t row, int64_t kv_head, const int64_t* keys,
                    int64_t count, float* weights) {
  const PagedCache& c = p.cache;
  const int64_t group = p.heads / c.kv_heads;
  for (int t = 0; t < kAverageTokens; ++t) weights[t] = 0;
  for (int64_t first = 0; first < group; first += kScoreHeads) {
    const int64_t heads = Min(kScoreHeads, group - first);
    const int64_t head = kv_head * group + first;
    alignas(64) float scores[kScoreHeads][kAverageTokens] = {};
    for (int64_t t = 0; t < count; ++t) {
      DotRow<S>(p.q + row * p.q_stride + head * c.head_dim, heads, c.head_dim,
                static_cast<const char*>(c.base) + keys[t] * SizeOf(c.type), c.type, c.head_dim,
                &scores[0][t], kAverageTokens);
    }
    for (int64_t h = 0; h < heads; ++h) {
      const typename S::F lse = S::Set1(p.lse[row * p.heads + head + h]);
      for (int t = 0; t < kAverageTokens; t += S::kWidth) {
        const typename S::F scaled = S::Mul(S::Load(scores[h] + t), S::Set1(p.scale));
        // The weight is at most 1 but for rounding: the token is one of those that made lse.
        const typename S::F w = Exp<S>(S::Min(S::Sub(scaled, lse), S::Set1(80.0f)));
        const typename S::F so_far = S::Load(weights + t);
        S::Store(weights + t,
                 p.reduction == GroupReduction::kMax ? S::Max(so_far, w) : S::Add(so_far, w));
      }
    }
  }
  if (p.reduction == GroupReduction::kMax) return;
  for (int t = 0; t < kAverageTokens; ++t) weights[t] /= static_cast<float>(group);
}

template <class S>
void AverageList(const MovingAverageParams& p, int64_t row, int64_t kv_head) {
  const UnitList list = UnitListOf(p, row, kv_head);
  const int64_t slot = p.slots[row];
  for (int64_t first = 0; first < list.tokens; first += kAverageTokens) {
    const int64_t count = Min(kAverageTokens, list.tokens - first);
    int64_t keys[kAverageTokens];
    for (int64_t t = 0; t < count; ++t) {
      keys[t] = KeyIndex(p.cache, slot, PlaceOfToken(list, first + t), kv_head);
    }
    alignas(64) float weights[kAverageTokens];
    ReducedWeights<S>(p, row, kv_head, keys, count, weights);
    for (int64_t t = 0; t < count; ++t) {
      const int64_t v = first + t;
      float& average =
          *reinterpret_cast<float*>(static_cast<char*>(p.average.base) +
                                    RowOffset(p.average, slot, PlaceOfToken(list, v), kv_head));
      const bool own = PositionOfToken(list, v) == p.positions[row];
      average = own ? weights[t] : (1 - p.alpha) * average + p.alpha * weights[t];
    }
  }
}

template <class S>
void MovingAverage(const MovingAverageParams& p, Worker worker) {
  if (p.cache.head_dim % 16 != 0) KernelCheckFailed("moving_average: head_dim a multiple of 16");
  const int64_t kv_heads = p.cache.kv_heads;
  const Range mine = Share(p.rows * kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    AverageList<S>(p, list / kv_heads, list % kv_heads);
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
