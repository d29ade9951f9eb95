// Causal paged attention for any path (`S`: see simd_math.h): float32 queries, softmax and sums.
//
// A chunk of kChunk tokens is converted to float32 once for all queries of a tile: K transposed to
// [head_dim][kChunk], so that the scores of one query against neighbouring tokens are one vector,
// and V as [kChunk][head_dim]. Each query keeps an online softmax over the chunks of a split; the
// splits of a query merge in order (MergePart). Each query goes through one fixed sequence of
// operations, however the queries are tiled: chunks and splits are cut at multiples of token
// numbers alone, and a token beyond a query's position has weight exactly 0.
#pragma once

#include "kernels/cpu/attention_items.h"

namespace sluice::kernels::cpu {
namespace {

inline constexpr int kChunk = 32;
inline constexpr int kHalfChunk = kPieceTokens;

// The addresses of half a chunk at some token; null: there is none.
struct HalfChunk {
  const char* keys = nullptr;
  const char* values = nullptr;
};

// Working memory (279 KiB with that of the items; with head_dim 64 a quarter of it is touched).
struct AttentionScratch : ItemScratch {
  alignas(64) float keys[kMaxHeadDim * kChunk];                   // [head_dim][kChunk]
  alignas(64) float values[kChunk * kMaxHeadDim];                 // [kChunk][head_dim]
  alignas(64) float queries[kMaxQueries * kMaxHeadDim];           // scaled, [queries][head_dim]
  alignas(64) float weights[kMaxQueries * kChunk];                // scores, then softmax weights
  alignas(64) char gathered[2][2][kHalfChunk * kMaxHeadDim * 4];  // K and V of scattered tokens
  int64_t element_bytes;  // bytes of an element of the cache
  HalfChunk now[2];       // the chunk's halves
  HalfChunk ahead[2];     // the halves of the next chunk
  float largest[kMaxQueries];
  float sums[kMaxQueries];
  float rescale[kMaxQueries];
};

// Asks for `bytes` bytes from `at` on, for the second-level cache: the first one is full of data in
// use, and has room for few requests.
inline void Ask(const char* at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

inline HalfChunk LocateHalfChunk(const PagedCache& c, const SplitPlace& place, int64_t first) {
  if (first >= place.end) return {};
  const int64_t element_bytes = c.type == DType::kFloat32 ? 4 : 2;
  const char* keys = static_cast<const char*>(c.base) + Locate(c, place, first).key * element_bytes;
  return {keys, keys + int64_t{c.block_tokens} * c.head_dim * element_bytes};
}

// Copies together the half chunk at token `first` of a scattered place; past the place's end its
// last token is repeated. Asks for the rows of the half chunk at token `ahead` of `of`.
inline HalfChunk GatherHalfChunk(const PagedCache& c, const SplitPlace& place, int64_t first,
                                 const SplitPlace& of, int64_t ahead,
                                 char (&out)[2][kHalfChunk * kMaxHeadDim * 4]) {
  const int64_t row_bytes = c.head_dim * SizeOf(c.type);
  for (int64_t t = 0; t < kHalfChunk; ++t) {
    const HalfChunk row = LocateHalfChunk(c, place, Min(first + t, place.end - 1));
    __builtin_memcpy(out[0] + t * row_bytes, row.keys, static_cast<size_t>(row_bytes));
    __builtin_memcpy(out[1] + t * row_bytes, row.values, static_cast<size_t>(row_bytes));
    const HalfChunk later = LocateHalfChunk(c, of, ahead + t);
    if (later.keys == nullptr) continue;
    Ask(later.keys, row_bytes);
    Ask(later.values, row_bytes);
  }
  return {out[0], out[1]};
}

// Returns the values of a chunk as floats: converted once, for many queries. With each line it asks
// for one line of the values of the next chunk; the next chunk's keys are asked for beside the
// scores. Blocks lie scattered, which the processor's own prefetcher cannot foresee, and a burst of
// requests would stall.
template <class S>
struct StagedValues {
  static void Stage(AttentionScratch& s, int64_t half, int64_t dim) {
    const auto* from = reinterpret_cast<const uint16_t*>(s.now[half].values);
    float* to = s.values + half * kHalfChunk * dim;
    for (int64_t i = 0; i < kHalfChunk * dim; i += 32) {
      if (s.ahead[half].values != nullptr) Ask(s.ahead[half].values + i * 2, 64);
      for (int64_t j = i; j < i + 32; j += S::kWidth) S::Store(to + j, S::LoadBf16(from + j));
    }
  }
  static typename S::F Load(const AttentionScratch& s, int64_t t, int64_t d, int64_t dim) {
    return S::Load(s.values + t * dim + d);
  }
  static void AskAhead(const AttentionScratch&, int64_t, int64_t, int64_t, int64_t) {}
};

// The same for few queries, which use a value so few times that it is best left where it is.
template <class S, typename T>
struct DirectValues {
  static void Stage(AttentionScratch&, int64_t, int64_t) {}
  static typename S::F Load(const AttentionScratch& s, int64_t t, int64_t d, int64_t dim) {
    const T* at =
        reinterpret_cast<const T*>(s.now[t / kHalfChunk].values) + t % kHalfChunk * dim + d;
    if constexpr (sizeof(T) == 2) {
      return S::LoadBf16(at);
    } else {
      return S::Load(at);
    }
  }
  // Together with elements [d, d + count) of token t it asks for the same elements of the next
  // chunk.
  static void AskAhead(const AttentionScratch& s, int64_t t, int64_t d, int64_t count,
                       int64_t dim) {
    constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
    const char* values = s.ahead[t / kHalfChunk].values;
    if (values != nullptr) Ask(values + (t % kHalfChunk * dim + d) * kBytes, count * kBytes);
  }
};

// Loads K of at most kChunk tokens from `first` on into the scratch, and notes where V is. A half
// chunk that the place ends in is copied: another thread may be appending to the block behind it.
template <class S, class Values>
void LoadChunk(const PagedCache& c, const SplitPlace& place, int64_t first, const SplitPlace& next,
               AttentionScratch& s) {
  const int64_t dim = c.head_dim;
  const bool last = first + kChunk >= place.end;
  const SplitPlace& of = last ? next : place;
  const int64_t ahead_first = last ? next.begin : first + kChunk;
  s.element_bytes = SizeOf(c.type);
  s.ahead[0] = s.ahead[1] = {};
  for (int64_t half = 0; half < 2 && first + half * kHalfChunk < place.end; ++half) {
    const int64_t begin = first + half * kHalfChunk, ahead = ahead_first + half * kHalfChunk;
    if (place.Scattered() || begin + kHalfChunk > place.end) {
      s.now[half] = GatherHalfChunk(c, place, begin, of, ahead, s.gathered[half]);
    } else {
      s.now[half] = LocateHalfChunk(c, place, begin);
      s.ahead[half] = LocateHalfChunk(c, of, ahead);
    }
    float* keys = s.keys + half * kHalfChunk;
    if (c.type == DType::kBFloat16) {
      S::TransposeKeys(reinterpret_cast<const uint16_t*>(s.now[half].keys), dim, keys);
    } else {
      const float* from = reinterpret_cast<const float*>(s.now[half].keys);
      for (int64_t t = 0; t < kHalfChunk; ++t) {
        for (int64_t d = 0; d < dim; ++d) keys[d * kChunk + t] = from[t * dim + d];
      }
    }
    Values::Stage(s, half, dim);
  }
}

// Asks for one dimension's share of the next chunk's keys.
inline void AskKeys(const AttentionScratch& s, int64_t d) {
  const int64_t bytes = kHalfChunk * s.element_bytes;
  if (d * bytes % 64 != 0) return;
  for (const HalfChunk& half : s.ahead) {
    if (half.keys != nullptr) Ask(half.keys + d * bytes, 64);
  }
}

// Computes weights[q][t] = queries[q] . keys[t] for kRows queries and the whole chunk.
template <class S, int kRows>
void ScoreTile(AttentionScratch& s, int64_t query, int64_t dim) {
  constexpr int kVectors = kChunk / S::kWidth;
  constexpr int kAtOnce = kVectors < S::kScoreVectors ? kVectors : S::kScoreVectors;
  for (int v = 0; v < kVectors; v += kAtOnce) {
    typename S::F sums[kRows][kAtOnce];
    for (auto& of_row : sums) {
      for (auto& sum : of_row) sum = S::Set1(0.0f);
    }
    const float* q = s.queries + query * dim;
    const float* keys = s.keys + v * S::kWidth;
    const bool ask = query == 0 && v == 0;
    for (int64_t d = 0; d < dim; ++d) {
      if (ask) AskKeys(s, d);
#pragma GCC unroll 8
      for (int j = 0; j < kAtOnce; ++j) {
        const typename S::F key = S::Load(keys + d * kChunk + j * S::kWidth);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sums[r][j] = S::Fma(S::Set1(q[r * dim + d]), key, sums[r][j]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int j = 0; j < kAtOnce; ++j) {
        S::Store(s.weights + (query + r) * kChunk + (v + j) * S::kWidth, sums[r][j]);
      }
    }
  }
}

// Turns the scores of one query for the chunk at `first` into softmax weights, and returns the
// factor for its sums so far. A chunk wholly beyond the query changes nothing.
template <class S>
void SoftmaxChunk(AttentionScratch& s, int64_t query, int64_t first) {
  using F = typename S::F;
  constexpr int kVectors = kChunk / S::kWidth;
  float* weights = s.weights + query * kChunk;
  const int64_t valid = s.last_token[query] + 1 - first;
  s.rescale[query] = 1;
  if (valid <= 0) {
    for (int t = 0; t < kChunk; ++t) weights[t] = 0;
    return;
  }
  for (int64_t t = valid; t < kChunk; ++t) weights[t] = kNegativeInfinity;
  F best = S::Load(weights);
  for (int v = 1; v < kVectors; ++v) best = S::Max(best, S::Load(weights + v * S::kWidth));
  const float chunk_largest = S::Largest(best);
  const float old_largest = s.largest[query];
  const float largest = old_largest > chunk_largest ? old_largest : chunk_largest;
  F total = S::Set1(0.0f);
  for (int v = 0; v < kVectors; ++v) {
    const F w = Exp<S>(S::Sub(S::Load(weights + v * S::kWidth), S::Set1(largest)));
    S::Store(weights + v * S::kWidth, w);
    total = S::Add(total, w);
  }
  const float rescale = old_largest == largest ? 1.0f : __builtin_expf(old_largest - largest);
  s.rescale[query] = rescale;
  s.sums[query] = s.sums[query] * rescale + S::Sum(total);
  s.largest[query] = largest;
}

// Computes outs[q] = outs[q] * rescale[q] + sum over `tokens` of weights[q][t] * values[t], for
// kRows queries and kVectors vectors of the head.
template <class S, class Values, int kRows, int kVectors>
void ValueTile(AttentionScratch& s, int64_t query, int64_t first_dim, int64_t dim, int64_t tokens) {
  typename S::F sums[kRows][kVectors];
  float* outs = s.outs + query * dim + first_dim;
  for (int r = 0; r < kRows; ++r) {
    const typename S::F rescale = S::Set1(s.rescale[query + r]);
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = S::Mul(S::Load(outs + r * dim + v * S::kWidth), rescale);
    }
  }
  const float* weights = s.weights + query * kChunk;
  for (int64_t t = 0; t < tokens; ++t) {
    if (query == 0) Values::AskAhead(s, t, first_dim, kVectors * S::kWidth, dim);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const typename S::F value = Values::Load(s, t, first_dim + v * S::kWidth, dim);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        sums[r][v] = S::Fma(S::Set1(weights[r * kChunk + t]), value, sums[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) S::Store(outs + r * dim + v * S::kWidth, sums[r][v]);
  }
}

template <class S, class Values, int kRows>
void ValueRows(AttentionScratch& s, int64_t query, int64_t dim, int64_t tokens) {
  constexpr int kVectors = S::kValueVectors;
  int64_t d = 0;
  for (; d + kVectors * S::kWidth <= dim; d += kVectors * S::kWidth) {
    ValueTile<S, Values, kRows, kVectors>(s, query, d, dim, tokens);
  }
  for (; d < dim; d += S::kWidth) ValueTile<S, Values, kRows, 1>(s, query, d, dim, tokens);
}

// Attends to one chunk with `rows` <= kRows queries from `query` on.
template <class S, class Values, int kRows>
void ChunkRows(AttentionScratch& s, int64_t query, int64_t rows, int64_t dim, int64_t first,
               int64_t tokens) {
  if (rows < kRows) {
    if constexpr (kRows > 1) ChunkRows<S, Values, kRows - 1>(s, query, rows, dim, first, tokens);
    return;
  }
  bool any = false;
  for (int r = 0; r < kRows; ++r) any = any || s.last_token[query + r] >= first;
  if (!any) return;
  ScoreTile<S, kRows>(s, query, dim);
  for (int r = 0; r < kRows; ++r) SoftmaxChunk<S>(s, query + r, first);
  ValueRows<S, Values, kRows>(s, query, dim, tokens);
}

// Computes (outs, lse) of every query of the scratch over `place`. The way in which values are
// loaded changes no bit.
template <class S, class Values>
void AttendSplit(const PagedCache& c, const SplitPlace& place, const SplitPlace& next,
                 int64_t queries, AttentionScratch& s) {
  const int64_t dim = c.head_dim;
  for (int64_t q = 0; q < queries; ++q) {
    s.largest[q] = kNegativeInfinity;
    s.sums[q] = 0;
  }
  for (int64_t i = 0; i < queries * dim; ++i) s.outs[i] = 0;
  for (int64_t first = place.begin; first < place.end; first += kChunk) {
    LoadChunk<S, Values>(c, place, first, next, s);
    const int64_t valid = Min(kChunk, place.end - first);
    for (int64_t q = 0; q < queries; q += S::kQueryRows) {
      ChunkRows<S, Values, S::kQueryRows>(s, q, Min(S::kQueryRows, queries - q), dim, first, valid);
    }
  }
  for (int64_t q = 0; q < queries; ++q) {
    const bool empty = s.last_token[q] < place.begin;
    s.lse[q] = empty ? kNegativeInfinity : s.largest[q] + __builtin_logf(s.sums[q]);
    if (empty) continue;
    const typename S::F sum = S::Set1(s.sums[q]);
    for (int64_t d = 0; d < dim; d += S::kWidth) {
      S::Store(s.outs + q * dim + d, S::Div(S::Load(s.outs + q * dim + d), sum));
    }
  }
}

template <class S>
void LoadQueries(const AttentionParams& p, const AttentionUnit& unit, AttentionScratch& s) {
  const int64_t dim = p.cache.head_dim;
  const typename S::F scale = S::Set1(p.scale);
  for (int64_t q = 0; q < unit.tile.rows * unit.heads; ++q) {
    const int64_t row = unit.tile.row + q / unit.heads;
    const float* from = p.q + row * p.q_stride + (unit.first_head + q % unit.heads) * dim;
    for (int64_t d = 0; d < dim; d += S::kWidth) {
      S::Store(s.queries + q * dim + d, S::Mul(S::Load(from + d), scale));
    }
  }
}

template <class S>
struct SimdAttention {
  using Vectors = S;
  using Scratch = AttentionScratch;

  // Returns the work per token of a tile's context: its dot products, and the conversion of K and
  // V.
  static constexpr int64_t CostPerToken(int64_t queries) { return queries + 6; }

  static void LoadQueries(const AttentionParams& p, const AttentionUnit& unit, Scratch& s) {
    cpu::LoadQueries<S>(p, unit, s);
  }
  static void AttendSplit(const PagedCache& c, const SplitPlace& place, const SplitPlace& next,
                          int64_t queries, Scratch& s) {
    if (c.type == DType::kFloat32) {
      cpu::AttendSplit<S, DirectValues<S, float>>(c, place, next, queries, s);
    } else if (queries <= kMaxGroupPart) {
      cpu::AttendSplit<S, DirectValues<S, uint16_t>>(c, place, next, queries, s);
    } else {
      cpu::AttendSplit<S, StagedValues<S>>(c, place, next, queries, s);
    }
  }
};

}  // namespace
}  // namespace sluice::kernels::cpu
