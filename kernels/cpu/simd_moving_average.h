// HGCA's moving average of attention weights for any path (`S`: see simd_math.h). Lists are split
// over workers. A weight is one fixed sequence of operations on its token and its heads.
#pragma once

#include "kernels/cpu/simd_math.h"
#include "kernels/cpu/unit_list.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int kAverageTokens = 16;  // weights computed at a time

// q . k over `dim` elements, a multiple of 16.
template <class S>
inline float DotKey(const float* q, const void* keys, DType type, int64_t key, int64_t dim) {
  typename S::F sum = S::Set1(0.0f);
  if (type == DType::kFloat32) {
    const float* k = static_cast<const float*>(keys) + key;
    for (int64_t d = 0; d < dim; d += S::kWidth) {
      sum = S::Fma(S::Load(q + d), S::Load(k + d), sum);
    }
  } else {
    const uint16_t* k = static_cast<const uint16_t*>(keys) + key;
    for (int64_t d = 0; d < dim; d += S::kWidth) {
      sum = S::Fma(S::Load(q + d), S::LoadBf16(k + d), sum);
    }
  }
  return S::Sum(sum);
}

// The group's reduced weights of `count` list tokens from `first` on.
template <class S>
void ReducedWeights(const MovingAverageParams& p, int64_t row, int64_t kv_head, const int64_t* keys,
                    int64_t count, float* weights) {
  const int64_t dim = p.cache.head_dim;
  const int64_t group = p.heads / p.cache.kv_heads;
  for (int t = 0; t < kAverageTokens; ++t) weights[t] = 0;
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    const float* q = p.q + row * p.q_stride + h * dim;
    const float lse = p.lse[row * p.heads + h];
    alignas(64) float scores[kAverageTokens];
    for (int64_t t = 0; t < kAverageTokens; ++t) {
      scores[t] = t < count ? p.scale * DotKey<S>(q, p.cache.base, p.cache.type, keys[t], dim) - lse
                            : kNegativeInfinity;
    }
    for (int t = 0; t < kAverageTokens; t += S::kWidth) {
      // At most 1 but for rounding: the token is one of those that made lse.
      const typename S::F w = Exp<S>(S::Min(S::Load(scores + t), S::Set1(80.0f)));
      const typename S::F old = S::Load(weights + t);
      S::Store(weights + t, p.reduction == GroupReduction::kMax ? S::Max(old, w) : S::Add(old, w));
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
