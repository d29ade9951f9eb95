// Scores of units from digests and from keys, for any path (`S`: see simd_math.h).
//
// Queries become floats once for each list, scaled; then every score is a dot product of a query
// and a row, one chain of vectors over the row in rising order, whatever is computed beside it.
#pragma once

#include "kernels/cpu/simd_digest.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int kScoreHeads = 8;  // query heads of a group that are taken at a time
inline constexpr int kScoreUnits = 64;
inline constexpr int kMaxRowDim = 2 * kMaxHeadDim;

// Computes out[h * stride] = queries[h] . row for kHeads queries of `dim` floats, `pitch` apart.
template <class S, int kHeads, typename T>
inline void DotHeads(const float* queries, int64_t pitch, const T* row, int64_t dim, float* out,
                     int64_t stride) {
  typename S::F sums[kHeads];
  for (auto& sum : sums) sum = S::Set1(0.0f);
  for (int64_t d = 0; d < dim; d += S::kWidth) {
    const typename S::F x = LoadElements<S>(row + d);
#pragma GCC unroll 8
    for (int h = 0; h < kHeads; ++h) {
      sums[h] = S::Fma(S::Load(queries + h * pitch + d), x, sums[h]);
    }
  }
  for (int h = 0; h < kHeads; ++h) out[h * stride] = S::Sum(sums[h]);
}

// Computes the same for `heads` <= kScoreHeads queries. dim: a multiple of 16.
template <class S, typename T>
void DotRow(const float* queries, int64_t heads, int64_t pitch, const T* row, int64_t dim,
            float* out, int64_t stride) {
  int64_t h = 0;
  for (; h + 4 <= heads; h += 4) {
    DotHeads<S, 4>(queries + h * pitch, pitch, row, dim, out + h * stride, stride);
  }
  for (; h + 2 <= heads; h += 2) {
    DotHeads<S, 2>(queries + h * pitch, pitch, row, dim, out + h * stride, stride);
  }
  if (h < heads) DotHeads<S, 1>(queries + h * pitch, pitch, row, dim, out + h * stride, stride);
}

template <class S>
void DotRow(const float* queries, int64_t heads, int64_t pitch, const void* row, DType type,
            int64_t dim, float* out, int64_t stride) {
  if (type == DType::kFloat32) {
    DotRow<S>(queries, heads, pitch, static_cast<const float*>(row), dim, out, stride);
  } else {
    DotRow<S>(queries, heads, pitch, static_cast<const uint16_t*>(row), dim, out, stride);
  }
}

// The largest and the sum of exp(x - largest) of everything added: log-sum-exp, online.
struct RunningSum {
  float largest = kNegativeInfinity;
  float sum = 0;

  float LogSumExp() const { return largest + __builtin_logf(sum); }
};

// Adds x[0, count), count <= kScoreUnits. The elements behind it up to the next vector are
// overwritten.
template <class S>
void AddTo(RunningSum& r, float* x, int64_t count) {
  using F = typename S::F;
  const int64_t padded = CeilDiv(count, S::kWidth) * S::kWidth;
  for (int64_t i = count; i < padded; ++i) x[i] = kNegativeInfinity;
  F best = S::Load(x);
  for (int64_t i = S::kWidth; i < padded; i += S::kWidth) best = S::Max(best, S::Load(x + i));
  const float of_these = S::Largest(best);
  const float largest = r.largest > of_these ? r.largest : of_these;
  if (largest == kNegativeInfinity) return;
  F total = S::Set1(0.0f);
  for (int64_t i = 0; i < padded; i += S::kWidth) {
    total = S::Add(total, Exp<S>(S::Sub(S::Load(x + i), S::Set1(largest))));
  }
  const float rescale = r.largest == largest ? 1.0f : __builtin_expf(r.largest - largest);
  r.sum = r.sum * rescale + S::Sum(total);
  r.largest = largest;
}

// Scores of kScoreHeads heads for a tile of units.
struct UnitScores {
  alignas(64) float scores[kScoreHeads][kScoreUnits];
};

// Writes the group's scores of units [begin, end) to out[unit]. `Source` computes scores:
//   SetHeads(first, count)           takes the next query heads of the group
//   Fill(first_unit, count, tile)    computes their scores of up to kScoreUnits units
// Under kSoftmaxSum the range must be all of the row's units. Tiles begin at multiples of
// kScoreUnits: the sums of a softmax are those of the list, whoever computes it.
template <class S, class Source>
void ReduceGroup(Source& source, int64_t group, GroupReduction reduction, int64_t begin,
                 int64_t end, float* out) {
  UnitScores tile = {};
  for (int64_t first = 0; first < group; first += kScoreHeads) {
    const int64_t heads = Min(kScoreHeads, group - first);
    source.SetHeads(first, heads);
    float lse[kScoreHeads];
    if (reduction == GroupReduction::kSoftmaxSum) {
      RunningSum sums[kScoreHeads];
      for (int64_t u = begin; u < end; u += kScoreUnits) {
        const int64_t count = Min(kScoreUnits, end - u);
        source.Fill(u, count, tile);
        for (int64_t h = 0; h < heads; ++h) AddTo<S>(sums[h], tile.scores[h], count);
      }
      for (int64_t h = 0; h < heads; ++h) lse[h] = sums[h].LogSumExp();
    }
    for (int64_t u = begin; u < end; u += kScoreUnits) {
      const int64_t count = Min(kScoreUnits, end - u);
      source.Fill(u, count, tile);
      for (int64_t h = 0; h < heads; ++h) {
        float* scores = tile.scores[h];
        if (reduction == GroupReduction::kSoftmaxSum) {
          for (int64_t i = 0; i < count; i += S::kWidth) {
            S::Store(scores + i, Exp<S>(S::Sub(S::Load(scores + i), S::Set1(lse[h]))));
          }
        }
        const bool is_first = first + h == 0;
        for (int64_t i = 0; i < count; ++i) {
          const float so_far = is_first ? scores[i] : out[u + i];
          const float larger = scores[i] > so_far ? scores[i] : so_far;
          out[u + i] = is_first                            ? scores[i]
                       : reduction == GroupReduction::kMax ? larger
                                                           : so_far + scores[i];
        }
      }
    }
  }
  if (reduction != GroupReduction::kMean) return;
  for (int64_t u = begin; u < end; ++u) out[u] /= static_cast<float>(group);
}

// Calls body(list, begin, end) for this worker's share of all units of all lists, or of whole lists
// if `whole`. units(row) is the number of units that a list of the row has.
template <class Units, class Body>
void ShareUnits(int64_t rows, int64_t kv_heads, bool whole, Worker worker, Units units, Body body) {
  int64_t total = 0;
  for (int64_t r = 0; r < rows; ++r) total += units(r) * kv_heads;
  const Range mine = Share(total, worker);
  int64_t before = 0;
  for (int64_t list = 0; list < rows * kv_heads && before < mine.end; ++list) {
    const int64_t count = units(list / kv_heads);
    if (whole) {
      if (before >= mine.begin && count > 0) body(list, int64_t{0}, count);
    } else {
      const int64_t begin = Max(mine.begin - before, 0), end = Min(mine.end - before, count);
      if (begin < end) body(list, begin, end);
    }
    before += count;
  }
}

// A block's bound is one dot product: of [smallest, largest], as the digest has them, with the
// query's negative elements, then its positive ones. A bound of narrowed ranges takes a part of an
// element from one end of the range and the rest from the other.
template <class S>
struct DigestSource {
  const DigestScoresParams& p;
  int64_t row, kv_head;
  int64_t heads = 0;
  alignas(64) float queries[kScoreHeads * kMaxRowDim];

  DigestSource(const DigestScoresParams& params, int64_t list)
      : p(params), row(list / p.digests.kv_heads), kv_head(list % p.digests.kv_heads) {}

  void SetHeads(int64_t first, int64_t count) {
    const int64_t dim = p.digests.dim / 2, group = p.heads / p.digests.kv_heads;
    const float other = p.narrowed / 2, own = 1 - other;
    heads = count;
    for (int64_t h = 0; h < count; ++h) {
      const float* q = p.q + row * p.q_stride + (kv_head * group + first + h) * dim;
      float* out = queries + h * 2 * dim;
      for (int64_t d = 0; d < dim; ++d) {
        const float scaled = q[d] * p.scale;
        // A negative scale would turn smallest and largest around; the scale is the softmax's, and
        // positive.
        out[d] = scaled * (scaled < 0 ? own : other);
        out[dim + d] = scaled * (scaled < 0 ? other : own);
      }
    }
  }

  const char* RowAt(int64_t block) const {
    return static_cast<const char*>(p.digests.base) +
           RowOffset(p.digests, p.slots[row], block, kv_head);
  }

  void Fill(int64_t first, int64_t count, UnitScores& tile) const {
    // Rows of a head lie apart, and are too short for the processor's own prefetcher.
    constexpr int64_t kAhead = 4;
    for (int64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        const char* ahead = RowAt(first + i + kAhead);
        const int64_t bytes = p.digests.dim * SizeOf(p.digests.type);
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(ahead + b);
      }
      const char* digest = RowAt(first + i);
      DotRow<S>(queries, heads, p.digests.dim, digest, p.digests.type, p.digests.dim,
                &tile.scores[0][i], kScoreUnits);
    }
  }
};

template <class S>
void DigestScores(const DigestScoresParams& p, Worker worker) {
  if (p.digests.dim % 32 != 0 || p.digests.dim > kMaxRowDim) {
    KernelCheckFailed("digest_scores: head_dim a multiple of 16 up to 256");
  }
  const int64_t kv_heads = p.digests.kv_heads;
  const bool whole = p.reduction == GroupReduction::kSoftmaxSum;
  const auto units = [&](int64_t r) {
    return p.slots[r] < 0 ? int64_t{0} : int64_t{p.positions[r] / p.block_tokens};
  };
  for (int64_t list = worker.index; list < p.rows * kv_heads; list += worker.count) {
    const int64_t row = list / kv_heads;
    if (p.slots[row] < 0) continue;
    p.scores[list * p.score_stride + p.positions[row] / p.block_tokens] = kNegativeInfinity;
  }
  ShareUnits(p.rows, kv_heads, whole, worker, units, [&](int64_t list, int64_t begin, int64_t end) {
    DigestSource<S> source(p, list);
    ReduceGroup<S>(source, p.heads / kv_heads, p.reduction, begin, end,
                   p.scores + list * p.score_stride);
  });
}

template <class S>
struct KeySource {
  const ExactScoresParams& p;
  int64_t row, kv_head;
  int64_t heads = 0;
  alignas(64) float queries[kScoreHeads * kMaxHeadDim];

  KeySource(const ExactScoresParams& params, int64_t list)
      : p(params), row(list / p.cache.kv_heads), kv_head(list % p.cache.kv_heads) {}

  void SetHeads(int64_t first, int64_t count) {
    const int64_t dim = p.cache.head_dim, group = p.heads / p.cache.kv_heads;
    heads = count;
    const float* q = p.q + row * p.q_stride + (kv_head * group + first) * dim;
    for (int64_t i = 0; i < count * dim; ++i) queries[i] = q[i] * p.scale;
  }

  // Computes the scores of tokens [begin, end), at most kScoreUnits of them.
  void FillTokens(int64_t begin, int64_t end, float* out) const {
    const PagedCache& c = p.cache;
    const int64_t bytes = int64_t{c.head_dim} * SizeOf(c.type);
    for (int64_t t = begin; t < end;) {
      const int64_t next = Min(end, (t / c.block_tokens + 1) * c.block_tokens);
      const char* key =
          static_cast<const char*>(c.base) + KeyIndex(c, p.slots[row], t, kv_head) * SizeOf(c.type);
      for (; t < next; ++t, key += bytes) {
        DotRow<S>(queries, heads, c.head_dim, key, c.type, c.head_dim, out + (t - begin),
                  kScoreUnits);
      }
    }
  }

  void Fill(int64_t first, int64_t count, UnitScores& tile) const {
    const int64_t tokens = p.positions[row] + int64_t{1};
    if (p.unit_tokens == 1) return FillTokens(first, first + count, tile.scores[0]);
    UnitScores of_tokens;
    for (int64_t i = 0; i < count; ++i) {
      RunningSum sums[kScoreHeads];
      const int64_t end = Min((first + i + 1) * p.unit_tokens, tokens);
      for (int64_t t = (first + i) * p.unit_tokens; t < end; t += kScoreUnits) {
        const int64_t these = Min(kScoreUnits, end - t);
        FillTokens(t, t + these, of_tokens.scores[0]);
        for (int64_t h = 0; h < heads; ++h) AddTo<S>(sums[h], of_tokens.scores[h], these);
      }
      for (int64_t h = 0; h < heads; ++h) tile.scores[h][i] = sums[h].LogSumExp();
    }
  }
};

template <class S>
void ExactScores(const ExactScoresParams& p, Worker worker) {
  if (p.cache.head_dim % 16 != 0 || p.cache.head_dim > kMaxHeadDim) {
    KernelCheckFailed("exact_scores: head_dim a multiple of 16 up to 256");
  }
  const int64_t kv_heads = p.cache.kv_heads;
  const bool whole = p.reduction == GroupReduction::kSoftmaxSum;
  const auto units = [&](int64_t r) {
    return p.slots[r] < 0 ? int64_t{0} : int64_t{p.positions[r] / p.unit_tokens} + 1;
  };
  ShareUnits(p.rows, kv_heads, whole, worker, units, [&](int64_t list, int64_t begin, int64_t end) {
    KeySource<S> source(p, list);
    ReduceGroup<S>(source, p.heads / kv_heads, p.reduction, begin, end,
                   p.scores + list * p.score_stride);
  });
}

}  // namespace
}  // namespace sluice::kernels::cpu
