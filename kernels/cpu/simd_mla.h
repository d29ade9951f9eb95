// Sparse MLA in float32 for any path (`S`: see simd_math.h).
//
// A chunk of kMlaChunk entries is converted to float32 once for all heads of an item: as it is,
// for the values, and transposed, so that the scores of one query against neighbouring entries are
// one vector. Each head keeps an online softmax over the chunks of a piece.
#pragma once

#include "kernels/cpu/mla_items.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int kMlaChunk = 32;
constexpr int64_t kMaxLatentWidth = kMaxLatentRank + kMaxLatentRope;

template <class S>
struct FloatMlaScratch {
  alignas(64) float entries[kMlaChunk * kMaxLatentWidth];  // [entry][rank + rope]
  alignas(64) float columns[kMaxLatentWidth * kMlaChunk];  // [rank + rope][entry]
  alignas(64) float queries[S::kQueryRows * kMaxLatentWidth];
  alignas(64) float weights[S::kQueryRows * kMlaChunk];
  float largest[kMlaMaxHeads];
  float sums[kMlaMaxHeads];
};

// Converts one entry to floats.
inline void EntryToFloat(const PagedLatents& c, const char* data, float* out) {
  static constexpr E4M3Values kValues = MakeE4M3Values();
  const int64_t width = c.rank + c.rope;
  if (c.type == DType::kFloat32) {
    __builtin_memcpy(out, data, static_cast<size_t>(width * 4));
    return;
  }
  const auto* halves = reinterpret_cast<const uint16_t*>(data);
  if (c.type == DType::kBFloat16) {
    for (int64_t i = 0; i < width; ++i) out[i] = Bf16ToFloat(halves[i]);
    return;
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(data);
  for (int64_t first = 0; first < kPackedRank; first += kPackedScaleTokens) {
    float scale;
    __builtin_memcpy(&scale, data + kPackedScalesAt + first / kPackedScaleTokens * 4, 4);
    for (int64_t i = first; i < first + kPackedScaleTokens; ++i) {
      out[i] = kValues.of[bytes[i]] * scale;
    }
  }
  for (int64_t i = 0; i < kPackedRope; ++i) {
    out[kPackedRank + i] = Bf16ToFloat(halves[kPackedRopeAt / 2 + i]);
  }
}

template <class S, int kRows>
void MlaScores(FloatMlaScratch<S>& s, int64_t width) {
  constexpr int kVectors = kMlaChunk / S::kWidth;
  constexpr int kAtOnce = kVectors < S::kScoreVectors ? kVectors : S::kScoreVectors;
  for (int v = 0; v < kVectors; v += kAtOnce) {
    typename S::F sums[kRows][kAtOnce];
    for (auto& of_row : sums) {
      for (auto& sum : of_row) sum = S::Set1(0.0f);
    }
    const float* columns = s.columns + v * S::kWidth;
    for (int64_t d = 0; d < width; ++d) {
#pragma GCC unroll 8
      for (int j = 0; j < kAtOnce; ++j) {
        const typename S::F entry = S::Load(columns + d * kMlaChunk + j * S::kWidth);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sums[r][j] = S::Fma(S::Set1(s.queries[r * width + d]), entry, sums[r][j]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int j = 0; j < kAtOnce; ++j) {
        S::Store(s.weights + r * kMlaChunk + (v + j) * S::kWidth, sums[r][j]);
      }
    }
  }
}

// Turns the scores of one head, the first `valid` of a chunk, into softmax weights; returns the
// factor for its sums so far.
template <class S>
float MlaSoftmax(float* weights, int64_t valid, float& largest, float& sum) {
  using F = typename S::F;
  constexpr int kVectors = kMlaChunk / S::kWidth;
  for (int64_t t = valid; t < kMlaChunk; ++t) weights[t] = kNegativeInfinity;
  F best = S::Load(weights);
  for (int v = 1; v < kVectors; ++v) best = S::Max(best, S::Load(weights + v * S::kWidth));
  const float of_chunk = S::Largest(best), before = largest;
  largest = before > of_chunk ? before : of_chunk;
  F total = S::Set1(0.0f);
  for (int v = 0; v < kVectors; ++v) {
    const F w = Exp<S>(S::Sub(S::Load(weights + v * S::kWidth), S::Set1(largest)));
    S::Store(weights + v * S::kWidth, w);
    total = S::Add(total, w);
  }
  const float rescale = before == largest ? 1.0f : __builtin_expf(before - largest);
  sum = sum * rescale + S::Sum(total);
  return rescale;
}

template <class S, int kRows, int kVectors>
void MlaValueTile(const FloatMlaScratch<S>& s, const float* rescale, int64_t first, int64_t rank,
                  int64_t width, int64_t valid, float* outs) {
  typename S::F sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = S::Mul(S::Load(outs + r * rank + first + v * S::kWidth), S::Set1(rescale[r]));
    }
  }
  for (int64_t t = 0; t < valid; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const typename S::F value = S::Load(s.entries + t * width + first + v * S::kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        sums[r][v] = S::Fma(S::Set1(s.weights[r * kMlaChunk + t]), value, sums[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      S::Store(outs + r * rank + first + v * S::kWidth, sums[r][v]);
    }
  }
}

// Attends to one chunk with `heads` <= kRows heads, of which h is the first in the piece.
template <class S, int kRows>
void MlaHeads(const SparseMlaParams& p, const MlaPiece& piece, int64_t h, int64_t heads,
              int64_t valid, FloatMlaScratch<S>& s, float* outs) {
  if (heads < kRows) {
    if constexpr (kRows > 1) MlaHeads<S, kRows - 1>(p, piece, h, heads, valid, s, outs);
    return;
  }
  const int64_t rank = p.cache.rank, width = rank + p.cache.rope;
  const int64_t q = (piece.row * p.heads + piece.head + h) * width;
  for (int64_t i = 0; i < kRows * width; ++i) {
    s.queries[i] = p.scale * (p.q_type == DType::kFloat32
                                  ? static_cast<const float*>(p.q)[q + i]
                                  : Bf16ToFloat(static_cast<const uint16_t*>(p.q)[q + i]));
  }
  MlaScores<S, kRows>(s, width);
  float rescale[kRows];
  for (int r = 0; r < kRows; ++r) {
    rescale[r] = MlaSoftmax<S>(s.weights + r * kMlaChunk, valid, s.largest[h + r], s.sums[h + r]);
  }
  constexpr int kVectors = S::kValueVectors;
  int64_t d = 0;
  for (; d + kVectors * S::kWidth <= rank; d += kVectors * S::kWidth) {
    MlaValueTile<S, kRows, kVectors>(s, rescale, d, rank, width, valid, outs + h * rank);
  }
  for (; d < rank; d += S::kWidth) {
    MlaValueTile<S, kRows, 1>(s, rescale, d, rank, width, valid, outs + h * rank);
  }
}

template <class S>
struct FloatMla {
  using Vectors = S;
  using Scratch = FloatMlaScratch<S>;
  static constexpr int64_t kSplitHeads = kMlaMaxHeads;

  static void AttendPiece(const SparseMlaParams& p, const MlaPiece& piece, Scratch& s, float* outs,
                          float* lse) {
    const int64_t rank = p.cache.rank, width = rank + p.cache.rope;
    const int64_t bytes = EntryBytes(p.cache.type, p.cache.rank, p.cache.rope);
    for (int64_t h = 0; h < piece.heads; ++h) {
      s.largest[h] = kNegativeInfinity;
      s.sums[h] = 0;
    }
    for (int64_t i = 0; i < piece.heads * rank; ++i) outs[i] = 0;
    for (int64_t first = piece.begin; first < piece.end; first += kMlaChunk) {
      const int64_t valid = Min(kMlaChunk, piece.end - first);
      for (int64_t t = 0; t < kMlaChunk; ++t) {
        float* entry = s.entries + t * width;
        if (t < valid) {
          EntryToFloat(p.cache, MlaEntryData(p, piece.row, first + t), entry);
          AskEntry(p, piece.row, first + t + kMlaChunk, bytes);
        }
        for (int64_t d = 0; d < width; ++d) s.columns[d * kMlaChunk + t] = t < valid ? entry[d] : 0;
      }
      for (int64_t h = 0; h < piece.heads; h += S::kQueryRows) {
        MlaHeads<S, S::kQueryRows>(p, piece, h, Min(S::kQueryRows, piece.heads - h), valid, s,
                                   outs);
      }
    }
    for (int64_t h = 0; h < piece.heads; ++h) {
      lse[h] = s.largest[h] + __builtin_logf(s.sums[h]);
      const typename S::F sum = S::Set1(s.sums[h]);
      for (int64_t d = 0; d < rank; d += S::kWidth) {
        S::Store(outs + h * rank + d, S::Div(S::Load(outs + h * rank + d), sum));
      }
    }
  }
};

}  // namespace
}  // namespace sluice::kernels::cpu
