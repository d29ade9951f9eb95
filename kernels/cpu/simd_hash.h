// CLO's operators (kernels/hash_params.h) for any path (`S`: see simd_math.h). A bit of a code is
// the sign of one chain of fused products over the elements of a vector, so that every path with
// fused products gives the same codes.
#pragma once

#include "kernels/cpu/simd_partial.h"
#include "kernels/group_similarity.h"
#include "kernels/hash_params.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int64_t kMaxHashWords = kMaxHashBits / 32;

template <class S>
void HashCode(const float* x, const float* hash, int64_t dim, int64_t words, int32_t* code) {
  alignas(64) float sums[kMaxHashBits];
  Project<S>(x, hash, dim, words * 32, sums);
  for (int64_t w = 0; w < words; ++w) {
    uint32_t word = 0;
    for (int64_t b = 0; b < 32; ++b) word |= (sums[w * 32 + b] > 0 ? 1u : 0u) << b;
    code[w] = static_cast<int32_t>(word);
  }
}

// Writes the planes of a query.
template <class S>
void QueryPlanes(const float* q, const float* hash, int64_t dim, int64_t words, int32_t levels,
                 int32_t* planes) {
  alignas(64) float sums[kMaxHashBits];
  Project<S>(q, hash, dim, words * 32, sums);
  float largest = 0;
  for (int64_t b = 0; b < words * 32; ++b) {
    const float size = __builtin_fabsf(sums[b]);
    largest = size > largest ? size : largest;
  }
  const float scale = static_cast<float>(levels) / largest;
  for (int64_t w = 0; w < words; ++w) {
    uint32_t plane[kHashPlanes] = {};
    for (int64_t b = 0; b < 32; ++b) {
      const float sum = sums[w * 32 + b];
      const float scaled = levels == 1 ? (sum > 0 ? 1.0f : -1.0f) : __builtin_rintf(sum * scale);
      const int level = scaled >= -8.0f && scaled <= 7.0f ? static_cast<int>(scaled) : 0;
      for (int i = 0; i < kHashPlanes; ++i) plane[i] |= static_cast<uint32_t>(level >> i & 1) << b;
    }
    for (int i = 0; i < kHashPlanes; ++i) planes[i * words + w] = static_cast<int32_t>(plane[i]);
  }
}

template <class S>
float SquaresOf(const float* x, int64_t dim) {
  typename S::F sum = S::Set1(0.0f);
  for (int64_t d = 0; d < dim; d += S::kWidth) sum = S::Fma(S::Load(x + d), S::Load(x + d), sum);
  return S::Sum(sum);
}

template <class S>
void KeyCentres(const KeyCentresParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  if (c.head_dim % 16 != 0) KernelCheckFailed("key_centres: head_dim a multiple of 16");
  const Range mine = Share(int64_t{p.rows} * c.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t slot = p.slots[list / c.kv_heads], h = list % c.kv_heads;
    if (slot < 0) continue;
    const int64_t tokens = int64_t{p.positions[list / c.kv_heads]} + 1;
    const int64_t count = Min(tokens, kCentreKeys);
    float* const centre = p.centres + (slot * c.kv_heads + h) * c.head_dim;
    for (int64_t d = 0; d < c.head_dim; d += S::kWidth) {
      typename S::F sum = S::Set1(0.0f);
      for (int64_t i = 0; i < count; ++i) {
        sum = S::Add(sum, LoadAs<S>(c.base, c.type, KeyIndex(c, slot, i * tokens / count, h) + d));
      }
      S::Store(centre + d, S::Div(sum, S::Set1(static_cast<float>(count))));
    }
  }
}

template <class S>
void HashKey(const HashKeysParams& p, int64_t slot, int64_t token) {
  const PagedCache& c = p.cache;
  const int64_t words = p.codes.dim;
  for (int64_t h = 0; h < c.kv_heads; ++h) {
    alignas(64) float key[kMaxHeadDim];
    const int64_t at = KeyIndex(c, slot, token, h);
    for (int64_t d = 0; d < c.head_dim; d += S::kWidth) {
      typename S::F element = LoadAs<S>(c.base, c.type, at + d);
      if (p.centres != nullptr) {
        element =
            S::Sub(element, S::Load(p.centres + (slot * int64_t{c.kv_heads} + h) * c.head_dim + d));
      }
      S::Store(key + d, element);
    }
    HashCode<S>(key, p.hash + h * c.head_dim * words * 32, c.head_dim, words,
                static_cast<int32_t*>(PartialRow(p.codes, slot, token, h)));
    const float length = __builtin_sqrtf(SquaresOf<S>(key, c.head_dim));
    WriteRounded(PartialRow(p.lengths, slot, token, h), p.lengths.type, 0, &length, 1);
  }
}

inline void CheckHash(int64_t head_dim, int64_t words) {
  if (head_dim % 16 != 0 || head_dim > kMaxHeadDim || words > kMaxHashWords) {
    KernelCheckFailed("hash codes: head_dim a multiple of 16 up to 256, up to 256 bits");
  }
}

template <class S>
void HashKeys(const HashKeysParams& p, Worker worker) {
  CheckHash(p.cache.head_dim, p.codes.dim);
  ShareTokens(p, worker, [&](int64_t slot, int64_t token) { HashKey<S>(p, slot, token); });
}

template <class S>
void HashQueries(const HashQueriesParams& p, Worker worker) {
  CheckHash(p.head_dim, p.words);
  const int64_t dim = p.head_dim, words = p.words, group = p.heads / p.kv_heads;
  const Range mine = Share(int64_t{p.rows} * p.heads, worker);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    const int64_t r = i / p.heads, h = i % p.heads;
    if (p.slots[r] < 0) continue;
    QueryPlanes<S>(p.q + r * p.q_stride + h * dim, p.hash + h / group * dim * words * 32, dim,
                   words, p.levels, p.codes + i * kHashPlanes * words);
  }
}

// Returns the number of bits that are set in both of two rows of words.
inline int32_t CommonBits(const int32_t* a, const int32_t* b, int64_t words) {
  int32_t count = 0;
  int64_t w = 0;
  for (; w + 2 <= words; w += 2) {
    uint64_t x = 0, y = 0;
    __builtin_memcpy(&x, a + w, sizeof(x));
    __builtin_memcpy(&y, b + w, sizeof(y));
    count += __builtin_popcountll(x & y);
  }
  if (w < words) count += __builtin_popcount(static_cast<uint32_t>(a[w] & b[w]));
  return count;
}

// Returns the sum of a query's levels over the bits that are set in a code.
inline int32_t SumOfLevels(const int32_t* planes, const int32_t* code, int64_t words) {
  int32_t sum = 0;
  for (int i = 0; i < kHashPlanes; ++i) {
    const int32_t bits = CommonBits(planes + i * words, code, words) << i;
    sum += i == kHashPlanes - 1 ? -bits : bits;
  }
  return sum;
}

// Returns the agreement of a list's queries with a key. `of_no_bits` has the sum of all levels of
// each query.
inline int32_t GroupAgreement(const int32_t* planes, const int32_t* of_no_bits, int64_t group,
                              const int32_t* code, int64_t words, GroupReduction reduction) {
  int32_t result = 0;
  for (int64_t i = 0; i < group; ++i) {
    const int32_t one =
        2 * SumOfLevels(planes + i * kHashPlanes * words, code, words) - of_no_bits[i];
    if (reduction == GroupReduction::kMean) {
      result += one;
    } else {
      result = i == 0 || one > result ? one : result;
    }
  }
  return result;
}

inline void HashScores(const HashScoresParams& p, Worker worker) {
  const int64_t kv_heads = p.codes.kv_heads, group = p.heads / kv_heads, words = p.codes.dim;
  CheckHash(16, words);
  if (group > kMaxHashGroup || p.reduction == GroupReduction::kSoftmaxSum) {
    KernelCheckFailed("hash scores: a group of up to 64 query heads, the largest or the mean");
  }
  const auto wanted = [&](int64_t list) {
    return p.slots[list / kv_heads] >= 0 && (p.wanted == nullptr || p.wanted[list] != 0);
  };
  for (int64_t list = worker.index; list < p.rows * kv_heads; list += worker.count) {
    if (wanted(list)) {
      p.scores[list * p.score_stride + p.positions[list / kv_heads]] = kNegativeInfinity;
    }
  }
  const auto tokens = [&](int64_t r) {
    return p.slots[r] < 0 ? int64_t{0} : int64_t{p.positions[r]};
  };
  ShareUnits(
      p.rows, kv_heads, false, worker, tokens, [&](int64_t list, int64_t begin, int64_t end) {
        if (!wanted(list)) return;
        const int64_t r = list / kv_heads, h = list % kv_heads;
        const int32_t* const planes = p.q_codes + (r * p.heads + h * group) * kHashPlanes * words;
        int32_t of_no_bits[kMaxHashGroup];
        int32_t all[kMaxHashWords];
        for (int32_t& word : all) word = -1;
        for (int64_t i = 0; i < group; ++i) {
          of_no_bits[i] = SumOfLevels(planes + i * kHashPlanes * words, all, words);
        }
        for (int64_t t = begin; t < end; ++t) {
          const int32_t n =
              GroupAgreement(planes, of_no_bits, group,
                             static_cast<const int32_t*>(PartialRow(p.codes, p.slots[r], t, h)),
                             words, p.reduction);
          p.scores[list * p.score_stride + t] =
              static_cast<float>(n) *
              ElementOf(PartialRow(p.lengths, p.slots[r], t, h), p.lengths.type, 0);
        }
      });
}

template <class S>
void LabelLookup(const LabelLookupParams& p, Worker worker) {
  const int64_t dim = p.head_dim, group = p.heads / p.kv_heads;
  if (dim % 16 != 0) KernelCheckFailed("label_lookup: head_dim a multiple of 16");
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    const int64_t slot = p.slots[r];
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      const int64_t list = r * p.kv_heads + h;
      p.missed[list] = slot < 0 ? 0 : p.others;
      if (slot < 0 || (p.wanted != nullptr && p.wanted[list] == 0)) continue;
      const float* q = p.q + r * p.q_stride + h * group * dim;
      float* label = p.labels + (slot * p.kv_heads + h) * group * dim;
      int32_t& labelled = p.labelled[slot * p.kv_heads + h];
      const int32_t age = LabelAge(p, p.positions[r]);
      bool hit = labelled >= 0 && labelled < p.positions[r] &&
                 (age == 0 || p.positions[r] - labelled < age);
      if (hit) {
        GroupSimilarity similarity;
        for (int64_t i = 0; i < group; ++i) {
          typename S::F product = S::Set1(0.0f);
          for (int64_t d = i * dim; d < (i + 1) * dim; d += S::kWidth) {
            product = S::Fma(S::Load(q + d), S::Load(label + d), product);
          }
          similarity.Add(S::Sum(product), SquaresOf<S>(q + i * dim, dim),
                         SquaresOf<S>(label + i * dim, dim), p.importance[h * group + i]);
        }
        hit = similarity.IsAtLeast(p.thresholds[h], p.rule);
      }
      p.missed[list] = hit ? 0 : 1;
      if (!hit) {
        labelled = p.positions[r];
        for (int64_t d = 0; d < group * dim; ++d) label[d] = q[d];
      }
      if (p.counters != nullptr) {
        p.counters[slot].lookups += 1;
        p.counters[slot].misses += p.missed[list];
      }
    }
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
