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

template <class S>
float SquaresOf(const float* x, int64_t dim) {
  typename S::F sum = S::Set1(0.0f);
  for (int64_t d = 0; d < dim; d += S::kWidth) sum = S::Fma(S::Load(x + d), S::Load(x + d), sum);
  return S::Sum(sum);
}

template <class S>
void HashKey(const HashKeysParams& p, int64_t slot, int64_t token) {
  const PagedCache& c = p.cache;
  const int64_t words = p.codes.dim;
  for (int64_t h = 0; h < c.kv_heads; ++h) {
    alignas(64) float key[kMaxHeadDim];
    const int64_t at = KeyIndex(c, slot, token, h);
    for (int64_t d = 0; d < c.head_dim; d += S::kWidth) {
      S::Store(key + d, LoadAs<S>(c.base, c.type, at + d));
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
    HashCode<S>(p.q + r * p.q_stride + h * dim, p.hash + h / group * dim * words * 32, dim, words,
                p.codes + i * words);
  }
}

// The weight of a key's bit in a score is group - 2 * the number of queries that have it set. Its
// half, rounded up, is a small signed number; plane i has bit i of that number for every bit of the
// code. The last plane has the sign.
struct HashPlanes {
  static constexpr int kMost = 8;

  HashPlanes(const int32_t* codes, int64_t group, int64_t words) : odd(group % 2 != 0) {
    while ((int64_t{1} << (planes - 1)) - 1 < (group + 1) / 2) ++planes;
    if (planes > kMost) KernelCheckFailed("hash scores: a group of up to 253 query heads");
    int64_t set = 0;
    for (int64_t w = 0; w < words; ++w) {
      for (int b = 0; b < 32; ++b) {
        int64_t count = 0;
        for (int64_t i = 0; i < group; ++i) {
          count += static_cast<uint32_t>(codes[i * words + w]) >> b & 1;
        }
        set += count;
        const auto half = static_cast<uint32_t>((group - 2 * count + (odd ? 1 : 0)) / 2);
        for (int i = 0; i < planes; ++i) plane[i][w] |= (half >> i & 1) << b;
      }
    }
    of_no_bits = group * words * 32 - 2 * set;
  }

  // Returns group * bits - 2 * the number of differing bits.
  int64_t Score(const int32_t* code, int64_t words) const {
    int64_t sum = 0, ones = 0;
    for (int64_t w = 0; w < words; ++w) {
      const auto word = static_cast<uint32_t>(code[w]);
      for (int i = 0; i < planes; ++i) {
        const int64_t bits = int64_t{__builtin_popcount(word & plane[i][w])} << i;
        sum += i == planes - 1 ? -bits : bits;
      }
      if (odd) ones += __builtin_popcount(word);
    }
    return of_no_bits - 4 * sum + 2 * ones;
  }

  const bool odd;
  int planes = 2;
  int64_t of_no_bits = 0;
  uint32_t plane[kMost][kMaxHashWords] = {};
};

inline void HashScores(const HashScoresParams& p, Worker worker) {
  const int64_t kv_heads = p.codes.kv_heads, group = p.heads / kv_heads, words = p.codes.dim;
  CheckHash(16, words);
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
  ShareUnits(p.rows, kv_heads, false, worker, tokens,
             [&](int64_t list, int64_t begin, int64_t end) {
               if (!wanted(list)) return;
               const int64_t r = list / kv_heads, h = list % kv_heads;
               const HashPlanes planes(p.q_codes + (r * p.heads + h * group) * words, group, words);
               for (int64_t t = begin; t < end; ++t) {
                 const int64_t n = planes.Score(
                     static_cast<const int32_t*>(PartialRow(p.codes, p.slots[r], t, h)), words);
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
