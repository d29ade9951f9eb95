// Sparse MLA by products of bf16, for the paths that have them (`Products::Linear` is the path's
// matrix product). Compiled with AVX-512 BF16 flags: internal linkage only.
//
// The entries of a piece are converted once for all heads of an item, times their scales, into
// panels twice: as columns, whose product with the queries is the scores, and as rows, whose
// product with the softmax weights, rounded to bf16, is the result. Softmax and sums are float32.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/linear_bf16.h"
#include "kernels/cpu/packed_bf16.h"
#include "kernels/cpu/simd_avx512.h"
#include "kernels/cpu/simd_mla.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int64_t kMlaHeads = 128;      // most heads of an item
constexpr int64_t kMlaKeys = 64;        // entries whose scores are one product
constexpr int64_t kMlaPieceHeads = 32;  // heads whose results are one product
constexpr int64_t kMlaGather = 16;      // entries that are converted at a time
constexpr int64_t kMlaWidth = kMaxLatentRank + kMaxLatentRope;

// 508 KiB.
struct Bf16MlaScratch {
  alignas(64) uint16_t rows[kMlaGather * kMlaWidth];               // [entry][rank + rope]
  alignas(64) uint16_t keys[kMlaKeys * kMlaWidth];                 // panels of 16 entries
  alignas(64) uint16_t values[kMlaSplitEntries * kMaxLatentRank];  // panels of 16 columns
  alignas(64) float scores[kMlaSplitEntries * kMlaHeads];  // [kMlaKeys at a time][head][entry]
  alignas(64) uint16_t weights[kMlaPieceHeads * kMlaSplitEntries];  // [head][entry]
  float sums[kMlaPieceHeads];
};

// Converts one entry, [rank + rope], and writes zeros behind it up to `padded`.
inline void EntryToBf16(const PagedLatents& c, const char* data, int64_t padded, uint16_t* out) {
  const int64_t width = c.rank + c.rope;
  for (int64_t i = width; i < padded; ++i) out[i] = 0;
  if (c.type == DType::kBFloat16) {
    __builtin_memcpy(out, data, static_cast<size_t>(width * 2));
    return;
  }
  for (int64_t first = 0; first < kPackedRank; first += kPackedScaleTokens) {
    float scale;
    __builtin_memcpy(&scale, data + kPackedScalesAt + first / kPackedScaleTokens * 4, 4);
    const __m512 scales = _mm512_set1_ps(scale);
    for (int64_t i = first; i < first + kPackedScaleTokens; i += 32) {
      const __m512i exact =
          E4M3ToBf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i)));
      const __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_mul_ps(UpperToFloat(exact), scales),
                                                   _mm512_mul_ps(LowerToFloat(exact), scales));
      _mm512_storeu_si512(out + i, (__m512i)rounded);
    }
  }
  __builtin_memcpy(out + kPackedRank, data + kPackedRopeAt, kPackedRope * 2);
}

// Puts kMlaGather rows as rows [first, first + kMlaGather) in panels of 16 columns and `depth`
// rows.
inline void PackValues(const uint16_t* rows, int64_t stride, int64_t rank, int64_t first,
                       int64_t depth, uint16_t* out) {
  for (int64_t t = 0; t < kMlaGather; t += 2) {
    const uint16_t* even = rows + t * stride;
    const uint16_t* odd = even + stride;
    uint16_t* to = out + (first + t) * kPanelColumns;
    for (int64_t d = 0; d < rank; d += kPanelColumns, to += depth * kPanelColumns) {
      const auto load = [&](const uint16_t* at) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + d)));
      };
      _mm512_storeu_si512(to, _mm512_or_si512(load(even), _mm512_slli_epi32(load(odd), 16)));
    }
  }
}

template <class Products>
struct Bf16Mla {
  using Vectors = Avx512;
  using Scratch = Bf16MlaScratch;
  static constexpr int64_t kSplitHeads = kMlaHeads;

  static void AttendPiece(const SparseMlaParams& p, const MlaPiece& piece, Scratch& s, float* outs,
                          float* lse) {
    const int64_t rank = p.cache.rank, count = piece.end - piece.begin;
    const int64_t depth = CeilDiv(count, kPanelDepth) * kPanelDepth;
    Scores(p, piece, depth, s);
    for (int64_t h = 0; h < piece.heads; h += kMlaPieceHeads) {
      const int64_t heads = Min(kMlaPieceHeads, piece.heads - h);
      for (int64_t i = 0; i < heads; ++i) {
        lse[h + i] =
            Softmax(s, piece.heads, h + i, count, depth, p.scale, s.weights + i * depth, s.sums[i]);
      }
      Product(s.weights, heads, s.values, rank, depth, outs + h * rank);
      for (int64_t i = 0; i < heads; ++i) {
        const __m512 sum = _mm512_set1_ps(s.sums[i]);
        float* out = outs + (h + i) * rank;
        for (int64_t d = 0; d < rank; d += 16) {
          _mm512_storeu_ps(out + d, _mm512_div_ps(_mm512_loadu_ps(out + d), sum));
        }
      }
    }
  }

 private:
  // Computes y [rows][n] = x [rows][k] times panels.
  static void Product(const uint16_t* x, int64_t rows, const uint16_t* w, int64_t n, int64_t k,
                      float* y) {
    LinearParams p = {};
    p.x = x;
    p.w = {w, static_cast<int32_t>(n), static_cast<int32_t>(k), WeightLayout::kPanel16};
    p.y = y;
    p.rows = p.decode_rows = static_cast<int32_t>(rows);
    p.x_type = DType::kBFloat16;
    Products::Linear(p);
  }

  // Computes the scores of all heads and entries, in blocks of up to kMlaKeys entries, and makes
  // the values' panels, whose rows past the last entry are zero.
  static void Scores(const SparseMlaParams& p, const MlaPiece& piece, int64_t depth, Scratch& s) {
    const PagedLatents& c = p.cache;
    const int64_t width = c.rank + c.rope, padded = CeilDiv(width, kPanelDepth) * kPanelDepth;
    const int64_t count = piece.end - piece.begin, bytes = EntryBytes(c.type, c.rank, c.rope);
    const uint16_t* q =
        static_cast<const uint16_t*>(p.q) + (piece.row * p.heads + piece.head) * width;
    for (int64_t block = 0; block < depth; block += kMlaKeys) {
      const int64_t entries = Min(kMlaKeys, depth - block);
      for (int64_t first = block; first < block + entries; first += kMlaGather) {
        for (int64_t t = 0; t < kMlaGather; ++t) {
          uint16_t* row = s.rows + t * padded;
          if (first + t < count) {
            const int64_t i = piece.begin + first + t;
            EntryToBf16(c, MlaEntryData(p, piece.row, i), padded, row);
            AskEntry(p, piece.row, i + kMlaGather, bytes);
          } else {
            for (int64_t d = 0; d < padded; ++d) row[d] = 0;
          }
        }
        uint16_t* keys = s.keys + (first - block) * padded;
        for (int64_t d = 0; d < padded; d += 32) {
          TransposePairs(s.rows + d, padded, keys + d * kPanelColumns);
        }
        PackValues(s.rows, padded, c.rank, first, depth, s.values);
      }
      Product(q, piece.heads, s.keys, entries, width, s.scores + block * piece.heads);
    }
  }

  // Computes the weights of one head, not yet divided by their sum, and returns the natural-log
  // sum-exp.
  static float Softmax(const Scratch& s, int64_t heads, int64_t head, int64_t count, int64_t depth,
                       float scale, uint16_t* weights, float& sum) {
    const __m512 scales = _mm512_set1_ps(scale), lowest = _mm512_set1_ps(kNegativeInfinity);
    __m512 scores[kMlaSplitEntries / 16];
    __m512 best = lowest;
    const int64_t vectors = depth / 16;
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t block = v * 16 / kMlaKeys * kMlaKeys, entries = Min(kMlaKeys, depth - block);
      const float* at = s.scores + block * heads + head * entries + (v * 16 - block);
      const auto valid = static_cast<__mmask16>((1u << Max(0, Min(16, count - v * 16))) - 1);
      scores[v] = _mm512_mask_mul_ps(lowest, valid, _mm512_loadu_ps(at), scales);
      best = _mm512_max_ps(best, scores[v]);
    }
    const float largest = _mm512_reduce_max_ps(best);
    __m512 total = _mm512_setzero_ps();
    for (int64_t v = 0; v < vectors; ++v) {
      const __m512 w = Exp<Avx512>(_mm512_sub_ps(scores[v], _mm512_set1_ps(largest)));
      total = _mm512_add_ps(total, w);
      Avx512::StoreBf16(weights + v * 16, w);
    }
    sum = _mm512_reduce_add_ps(total);
    return largest + __builtin_logf(sum);
  }
};

// Caches of float32 are for exactness: their products stay in float32.
template <class Products>
void SparseMlaBf16(const SparseMlaParams& p, Worker worker) {
  if (p.q_type != DType::kBFloat16) KernelCheckFailed("sparse_mla: bf16 queries");
  if (p.cache.type == DType::kFloat32) return SparseMla<FloatMla<Avx512>>(p, worker);
  SparseMla<Bf16Mla<Products>>(p, worker);
}

}  // namespace
}  // namespace sluice::kernels::cpu
