// Index logits of the packed form by products of bf16, in which e4m3 values are exact, for the
// paths that have them (`Products::Linear` is the path's matrix product). The keys of a chunk
// become panels once for all heads of a row. A chunk of all heads' dot products becomes one
// weighted sum of their positive parts, the heads in order. Compiled with AVX-512 BF16 flags:
// internal linkage only.
#pragma once

#include "kernels/cpu/linear_bf16.h"
#include "kernels/cpu/packed_bf16.h"
#include "kernels/cpu/simd_avx512.h"
#include "kernels/cpu/simd_index_logits.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int64_t kPackedLogitsChunk = 256;

// 230 KiB.
struct PackedLogitsScratch {
  alignas(64) uint16_t queries[kMaxIndexHeads * kIndexDim];     // [head][128]
  alignas(64) uint16_t rows[kPanelColumns * kIndexDim];         // [token][128]
  alignas(64) uint16_t keys[kPackedLogitsChunk * kIndexDim];    // panels of 16 tokens
  alignas(64) float dots[kMaxIndexHeads * kPackedLogitsChunk];  // [head][token]
  alignas(64) float scales[kPackedLogitsChunk];
};

inline void E4M3RowToBf16(const uint8_t* from, uint16_t* to) {
  for (int64_t d = 0; d < kIndexDim; d += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + d));
    _mm512_storeu_si512(to + d, E4M3ToBf16(bytes));
  }
}

// Converts keys [first, first + count) of a sequence to whole panels; elements past them are 0.
inline void PackKeys(const PagedIndexKeys& c, int64_t slot, int64_t first, int64_t count,
                     PackedLogitsScratch& s) {
  const char* base = static_cast<const char*>(c.base);
  for (int64_t panel = 0; panel < count; panel += kPanelColumns) {
    for (int64_t t = 0; t < kPanelColumns; ++t) {
      uint16_t* row = s.rows + t * kIndexDim;
      const int64_t token = first + panel + t;
      if (panel + t >= count) {
        for (int64_t d = 0; d < kIndexDim; ++d) row[d] = 0;
        s.scales[panel + t] = 0;
        continue;
      }
      const char* key = base + IndexKeyOffset(c, slot, token);
      E4M3RowToBf16(reinterpret_cast<const uint8_t*>(key), row);
      __builtin_memcpy(&s.scales[panel + t], base + IndexScaleOffset(c, slot, token), 4);
    }
    uint16_t* to = s.keys + panel * kIndexDim;
    for (int64_t d = 0; d < kIndexDim; d += 32) {
      TransposePairs(s.rows + d, kIndexDim, to + d * kPanelColumns);
    }
  }
}

// Computes the scores of `count` tokens from their dot products, [heads][padded].
inline void SumHeads(const PackedLogitsScratch& s, const float* weights, int64_t heads,
                     int64_t count, int64_t padded, float* scores) {
  const __m512 zero = _mm512_setzero_ps();
  for (int64_t t = 0; t < count; t += 16) {
    __m512 score = zero;
    for (int64_t h = 0; h < heads; ++h) {
      // NaN stays NaN.
      const __m512 positive = _mm512_max_ps(zero, _mm512_load_ps(s.dots + h * padded + t));
      score = _mm512_fmadd_ps(_mm512_set1_ps(weights[h]), positive, score);
    }
    const auto valid = static_cast<__mmask16>((1u << Min(16, count - t)) - 1);
    _mm512_mask_storeu_ps(scores + t, valid, _mm512_mul_ps(score, _mm512_load_ps(s.scales + t)));
  }
}

template <class Products>
void IndexLogitsPacked(const IndexLogitsParams& p, Worker worker) {
  PackedLogitsScratch s;
  ForEachLogitsChunk<kPackedLogitsChunk>(
      p, worker,
      [&](int64_t r) {
        const auto* q = static_cast<const uint8_t*>(p.q) + r * p.heads * kIndexDim;
        for (int64_t h = 0; h < p.heads; ++h) {
          E4M3RowToBf16(q + h * kIndexDim, s.queries + h * kIndexDim);
        }
      },
      [&](int64_t r, int64_t first, int64_t count) {
        const int64_t padded = CeilDiv(count, kPanelColumns) * kPanelColumns;
        PackKeys(p.cache, p.slots[r], first, count, s);
        LinearParams product = {};
        product.x = s.queries;
        product.w = {s.keys, static_cast<int32_t>(padded), kIndexDim, WeightLayout::kPanel16};
        product.y = s.dots;
        product.rows = product.decode_rows = p.heads;
        product.x_type = DType::kBFloat16;
        Products::Linear(product);
        SumHeads(s, p.weights + r * p.heads, p.heads, count, padded,
                 p.scores + r * p.score_stride + first);
      });
}

template <class Products>
void IndexLogitsBf16(const IndexLogitsParams& p, Worker worker) {
  if (p.cache.type == DType::kFloat8E4M3) return IndexLogitsPacked<Products>(p, worker);
  IndexLogits<Avx512>(p, worker);
}

}  // namespace
}  // namespace sluice::kernels::cpu
