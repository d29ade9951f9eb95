// InfiniGen's partial keys and their scores for any path (`S`: see simd_math.h). Tokens and lists
// are split over workers; sums run over elements in one order, whatever the other tokens.
#pragma once

#include "kernels/cpu/simd_elementwise.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int kMaxRank = kMaxHeadDim;
inline constexpr int kScoreTokens = 16;  // scored at a time
inline constexpr int kScoreHeads = 16;   // query heads that share the reading of partial keys

inline void* PartialRow(const PagedRows& rows, int64_t slot, int64_t row, int64_t head) {
  return static_cast<char*>(rows.base) + RowOffset(rows, slot, row, head);
}

inline float ElementOf(const void* data, DType type, int64_t i) {
  return type == DType::kFloat32 ? static_cast<const float*>(data)[i]
                                 : Bf16ToFloat(static_cast<const uint16_t*>(data)[i]);
}

template <class S>
inline typename S::F LoadAs(const void* data, DType type, int64_t i) {
  return type == DType::kFloat32 ? S::Load(static_cast<const float*>(data) + i)
                                 : S::LoadBf16(static_cast<const uint16_t*>(data) + i);
}

// out[j] = sum over d of x[d] * projection[d][j], for kVectors vectors of columns.
template <class S, int kVectors>
inline void ProjectColumns(const float* x, const float* projection, int64_t dim, int64_t rank,
                           float* out) {
  typename S::F sums[kVectors];
  for (auto& sum : sums) sum = S::Set1(0.0f);
  for (int64_t d = 0; d < dim; ++d) {
    const typename S::F element = S::Set1(x[d]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[v] = S::Fma(element, S::Load(projection + d * rank + v * S::kWidth), sums[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) S::Store(out + v * S::kWidth, sums[v]);
}

// The same for all columns: one chain over d for each.
template <class S>
void Project(const float* x, const float* projection, int64_t dim, int64_t rank, float* out) {
  constexpr int kVectors = 4;
  int64_t j = 0;
  for (; j + kVectors * S::kWidth <= rank; j += kVectors * S::kWidth) {
    ProjectColumns<S, kVectors>(x, projection + j, dim, rank, out + j);
  }
  for (; j + S::kWidth <= rank; j += S::kWidth) {
    ProjectColumns<S, 1>(x, projection + j, dim, rank, out + j);
  }
  for (; j < rank; ++j) {
    float sum = 0;
    for (int64_t d = 0; d < dim; ++d) sum += x[d] * projection[d * rank + j];
    out[j] = sum;
  }
}

template <class S>
void PartialKey(const PartialKeysParams& p, int64_t slot, int64_t token) {
  const PagedCache& c = p.cache;
  const int64_t rank = p.partial.dim;
  for (int64_t h = 0; h < c.kv_heads; ++h) {
    alignas(64) float key[kMaxHeadDim], projected[kMaxRank];
    const int64_t at = KeyIndex(c, slot, token, h);
    for (int64_t d = 0; d < c.head_dim; d += S::kWidth) {
      S::Store(key + d, LoadAs<S>(c.base, c.type, at + d));
    }
    Project<S>(key, p.projection + h * c.head_dim * rank, c.head_dim, rank, projected);
    WriteRounded(PartialRow(p.partial, slot, token, h), p.partial.type, 0, projected, rank);
  }
}

template <class S>
void PartialKeys(const PartialKeysParams& p, Worker worker) {
  if (p.cache.head_dim % 16 != 0 || p.cache.head_dim > kMaxHeadDim || p.partial.dim > kMaxRank) {
    KernelCheckFailed("partial_keys: head_dim a multiple of 16 up to 256, rank up to 256");
  }
  const auto first_of = [&](int64_t r) {
    return int64_t{p.first_positions != nullptr ? p.first_positions[r] : p.positions[r]};
  };
  const auto tokens_of = [&](int64_t r) {
    return p.slots[r] < 0 ? 0 : Max(0, p.positions[r] + 1 - first_of(r));
  };
  int64_t total = 0;
  for (int64_t r = 0; r < p.rows; ++r) total += tokens_of(r);
  const Range mine = Share(total, worker);
  int64_t before = 0;
  for (int64_t r = 0; r < p.rows && before < mine.end; ++r) {
    const int64_t tokens = tokens_of(r);
    const int64_t end = Min(mine.end - before, tokens);
    for (int64_t t = Max(mine.begin - before, 0); t < end; ++t) {
      PartialKey<S>(p, p.slots[r], first_of(r) + t);
    }
    before += tokens;
  }
}

// q . partial, both of `rank` elements.
template <class S>
inline float DotPartial(const float* q, const void* partial, DType type, int64_t rank) {
  typename S::F sum = S::Set1(0.0f);
  int64_t j = 0;
  for (; j + S::kWidth <= rank; j += S::kWidth) {
    sum = S::Fma(S::Load(q + j), LoadAs<S>(partial, type, j), sum);
  }
  float tail = 0;
  for (; j < rank; ++j) tail += q[j] * ElementOf(partial, type, j);
  return S::Sum(sum) + tail;
}

// The projected queries of some heads of one list, scaled.
struct PartialQueries {
  alignas(64) float q[kScoreHeads][kMaxRank];
  int64_t slot;
  int64_t kv_head;
  int64_t heads;
  int64_t tokens;
};

// Calls take(t, count, scores) for tokens [t, t + count) in order, count <= kScoreTokens;
// scores[h][i], those past the count being -inf.
template <class S, typename Take>
void ForEachScores(const PartialScoresParams& p, const PartialQueries& queries, Take take) {
  const PagedRows& rows = p.partial;
  const int64_t row_bytes = rows.dim * (rows.type == DType::kFloat32 ? 4 : 2);
  for (int64_t t = 0; t < queries.tokens;) {
    const int64_t in_page = rows.rows_per_page - t % rows.rows_per_page;
    const int64_t count = Min(kScoreTokens, Min(in_page, queries.tokens - t));
    const char* at = static_cast<const char*>(PartialRow(rows, queries.slot, t, queries.kv_head));
    alignas(64) float scores[kScoreHeads][kScoreTokens];
    for (int64_t h = 0; h < queries.heads; ++h) {
      for (int64_t i = 0; i < kScoreTokens; ++i) {
        scores[h][i] = i < count
                           ? DotPartial<S>(queries.q[h], at + i * row_bytes, rows.type, rows.dim)
                           : kNegativeInfinity;
      }
    }
    take(t, count, scores);
    t += count;
  }
}

// Replaces scores by exp(scores - largest) and returns their sum.
template <class S>
inline float Exponentials(float* scores, float largest) {
  typename S::F total = S::Set1(0.0f);
  for (int i = 0; i < kScoreTokens; i += S::kWidth) {
    const typename S::F e = Exp<S>(S::Sub(S::Load(scores + i), S::Set1(largest)));
    S::Store(scores + i, e);
    total = S::Add(total, e);
  }
  return S::Sum(total);
}

// out[t] += the sum over heads of softmax(scores): once for the sums, once for the weights.
template <class S>
void AddSoftmax(const PartialScoresParams& p, const PartialQueries& queries, float* out) {
  float largest[kScoreHeads], sums[kScoreHeads];
  for (int64_t h = 0; h < queries.heads; ++h) {
    largest[h] = kNegativeInfinity;
    sums[h] = 0;
  }
  ForEachScores<S>(p, queries, [&](int64_t, int64_t count, auto& scores) {
    for (int64_t h = 0; h < queries.heads; ++h) {
      float best = largest[h];
      for (int64_t i = 0; i < count; ++i) best = scores[h][i] > best ? scores[h][i] : best;
      const float rescale = best == largest[h] ? 1.0f : __builtin_expf(largest[h] - best);
      sums[h] = sums[h] * rescale + Exponentials<S>(scores[h], best);
      largest[h] = best;
    }
  });
  ForEachScores<S>(p, queries, [&](int64_t t, int64_t count, auto& scores) {
    for (int64_t h = 0; h < queries.heads; ++h) {
      Exponentials<S>(scores[h], largest[h]);
      for (int64_t i = 0; i < count; ++i) out[t + i] += scores[h][i] / sums[h];
    }
  });
}

template <class S>
void PartialScoresOfList(const PartialScoresParams& p, int64_t list) {
  const int64_t kv_heads = p.partial.kv_heads, rank = p.partial.dim, dim = p.head_dim;
  const int64_t row = list / kv_heads, group = p.heads / kv_heads;
  PartialQueries queries;
  queries.slot = p.slots[row];
  queries.kv_head = list % kv_heads;
  queries.tokens = p.positions[row];
  float* out = p.scores + list * p.score_stride;
  const bool max = p.reduction == GroupReduction::kMax;
  for (int64_t t = 0; t < queries.tokens; ++t) out[t] = max ? kNegativeInfinity : 0.0f;
  out[queries.tokens] = kNegativeInfinity;
  const float factor =
      p.reduction == GroupReduction::kMean ? p.scale / static_cast<float>(group) : p.scale;
  for (int64_t first = 0; first < group; first += kScoreHeads) {
    queries.heads = Min(kScoreHeads, group - first);
    for (int64_t h = 0; h < queries.heads; ++h) {
      const int64_t head = queries.kv_head * group + first + h;
      Project<S>(p.q + row * p.q_stride + head * dim, p.projection + queries.kv_head * dim * rank,
                 dim, rank, queries.q[h]);
      for (int64_t j = 0; j < rank; ++j) queries.q[h][j] *= factor;
    }
    if (p.reduction == GroupReduction::kSoftmaxSum) {
      AddSoftmax<S>(p, queries, out);
      continue;
    }
    ForEachScores<S>(p, queries, [&](int64_t t, int64_t count, auto& scores) {
      for (int64_t h = 0; h < queries.heads; ++h) {
        for (int64_t i = 0; i < count; ++i) {
          const float score = scores[h][i];
          out[t + i] = !max ? out[t + i] + score : score > out[t + i] ? score : out[t + i];
        }
      }
    });
  }
}

template <class S>
void PartialScores(const PartialScoresParams& p, Worker worker) {
  if (p.head_dim > kMaxHeadDim || p.partial.dim > kMaxRank) {
    KernelCheckFailed("partial_scores: head_dim and rank up to 256");
  }
  const Range mine = Share(int64_t{p.rows} * p.partial.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    if (p.slots[list / p.partial.kv_heads] >= 0) PartialScoresOfList<S>(p, list);
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
