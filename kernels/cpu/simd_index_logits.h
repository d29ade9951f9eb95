// Index logits in float32 for any path (`S`: see simd_math.h). A chunk of kLogitsChunk keys is
// converted and transposed once for all heads of its row; the heads count in order. e4m3 products
// are exact, and so only their sums are rounded.
#pragma once

#include "kernels/cpu/simd_latent.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int kLogitsChunk = 32;
constexpr int64_t kMaxIndexHeads = 128;

struct LogitsScratch {
  alignas(64) float keys[kIndexDim * kLogitsChunk];  // [128][token]
  alignas(64) float queries[kMaxIndexHeads * kIndexDim];
  alignas(64) float scores[kLogitsChunk];
  float scales[kLogitsChunk];
};

// Loads keys [first, first + count) of a sequence; the rest of the chunk is 0.
inline void LoadKeys(const PagedIndexKeys& c, int64_t slot, int64_t first, int64_t count,
                     LogitsScratch& s) {
  static constexpr E4M3Values kValues = MakeE4M3Values();
  const char* base = static_cast<const char*>(c.base);
  for (int64_t t = 0; t < kLogitsChunk; ++t) {
    s.scales[t] = 1;
    if (t >= count) {
      for (int64_t d = 0; d < kIndexDim; ++d) s.keys[d * kLogitsChunk + t] = 0;
      continue;
    }
    const char* key = base + IndexKeyOffset(c, slot, first + t);
    for (int64_t d = 0; d < kIndexDim; ++d) {
      float& value = s.keys[d * kLogitsChunk + t];
      if (c.type == DType::kFloat8E4M3) {
        value = kValues.of[static_cast<uint8_t>(key[d])];
      } else if (c.type == DType::kBFloat16) {
        value = Bf16ToFloat(reinterpret_cast<const uint16_t*>(key)[d]);
      } else {
        value = reinterpret_cast<const float*>(key)[d];
      }
    }
    if (c.type == DType::kFloat8E4M3) {
      __builtin_memcpy(&s.scales[t], base + IndexScaleOffset(c, slot, first + t), 4);
    }
  }
}

inline void LoadIndexQueries(const IndexLogitsParams& p, int64_t row, LogitsScratch& s) {
  static constexpr E4M3Values kValues = MakeE4M3Values();
  const int64_t count = int64_t{p.heads} * kIndexDim;
  for (int64_t i = 0; i < count; ++i) {
    s.queries[i] = p.cache.type == DType::kFloat8E4M3
                       ? kValues.of[static_cast<const uint8_t*>(p.q)[row * count + i]]
                       : static_cast<const float*>(p.q)[row * count + i];
  }
}

// Adds kRows heads' weighted scores of the whole chunk, one head after the other.
template <class S, int kRows>
void AddHeads(const float* queries, const float* weights, int64_t heads, LogitsScratch& s) {
  if (heads < kRows) {
    if constexpr (kRows > 1) AddHeads<S, kRows - 1>(queries, weights, heads, s);
    return;
  }
  constexpr int kVectors = kLogitsChunk / S::kWidth;
  constexpr int kAtOnce = kVectors < S::kScoreVectors ? kVectors : S::kScoreVectors;
  for (int v = 0; v < kVectors; v += kAtOnce) {
    typename S::F sums[kRows][kAtOnce];
    for (auto& of_row : sums) {
      for (auto& sum : of_row) sum = S::Set1(0.0f);
    }
    const float* keys = s.keys + v * S::kWidth;
    for (int64_t d = 0; d < kIndexDim; ++d) {
#pragma GCC unroll 8
      for (int j = 0; j < kAtOnce; ++j) {
        const typename S::F key = S::Load(keys + d * kLogitsChunk + j * S::kWidth);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sums[r][j] = S::Fma(S::Set1(queries[r * kIndexDim + d]), key, sums[r][j]);
        }
      }
    }
    for (int j = 0; j < kAtOnce; ++j) {
      float* at = s.scores + (v + j) * S::kWidth;
      typename S::F score = S::Load(at);
      for (int r = 0; r < kRows; ++r) {
        score = S::Fma(S::Set1(weights[r]), S::Max(S::Set1(0.0f), sums[r][j]), score);
      }
      S::Store(at, score);
    }
  }
}

// Divides the chunks of all rows, in order, in equal shares: calls begin(row) before a row's first
// chunk, then chunk(row, first token, tokens) for each of the worker's chunks.
template <int64_t kChunk, typename Begin, typename Chunk>
void ForEachLogitsChunk(const IndexLogitsParams& p, Worker worker, Begin begin, Chunk chunk) {
  if (p.heads > kMaxIndexHeads) KernelCheckFailed("index_logits: up to 128 heads");
  const auto chunks_of = [&](int64_t r) {
    return p.slots[r] < 0 ? 0 : CeilDiv(int64_t{p.positions[r]} + 1, kChunk);
  };
  int64_t total = 0;
  for (int64_t r = 0; r < p.rows; ++r) total += chunks_of(r);
  const Range mine = Share(total, worker);
  int64_t chunks = 0;
  for (int64_t r = 0; r < p.rows && chunks < mine.end; ++r) {
    const int64_t before = chunks;
    chunks += chunks_of(r);
    if (chunks <= mine.begin || chunks == before) continue;
    begin(r);
    const int64_t context = int64_t{p.positions[r]} + 1;
    for (int64_t i = Max(mine.begin, before); i < Min(mine.end, chunks); ++i) {
      const int64_t first = (i - before) * kChunk;
      chunk(r, first, Min(kChunk, context - first));
    }
  }
}

template <class S>
void IndexLogits(const IndexLogitsParams& p, Worker worker) {
  LogitsScratch s;
  ForEachLogitsChunk<kLogitsChunk>(
      p, worker, [&](int64_t r) { LoadIndexQueries(p, r, s); },
      [&](int64_t r, int64_t first, int64_t count) {
        LoadKeys(p.cache, p.slots[r], first, count, s);
        for (float& score : s.scores) score = 0;
        for (int64_t h = 0; h < p.heads; h += S::kQueryRows) {
          AddHeads<S, S::kQueryRows>(s.queries + h * kIndexDim, p.weights + r * p.heads + h,
                                     Min(S::kQueryRows, p.heads - h), s);
        }
        float* out = p.scores + r * p.score_stride + first;
        for (int64_t t = 0; t < count; ++t) out[t] = s.scores[t] * s.scales[t];
      });
}

}  // namespace
}  // namespace sluice::kernels::cpu
