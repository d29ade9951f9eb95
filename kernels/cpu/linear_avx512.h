// Matrix products of bf16 activations and panels by the dot products of AVX-512 BF16. Compiled with
// those flags: internal linkage only.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/linear_bf16.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int kLinearRows = 6;
constexpr int PanelsOf(int rows) { return rows <= 3 ? 8 : 4; }

// Puts two neighbouring activations in every lane; `count` < 2 only past an odd k.
inline __m512bh BroadcastPair(const uint16_t* x, int64_t count) {
  uint32_t pair = x[0];
  if (count >= 2) __builtin_memcpy(&pair, x, 4);
  return (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(pair));
}

// Sums kRows rows of k elements, which may lie anywhere, with kPanels panels from `w` on. Every sum
// is one chain of dot products over k in rising order.
template <int kRows, int kPanels>
[[gnu::always_inline]] inline void PanelSums(const uint16_t* const (&x)[kRows], const uint16_t* w,
                                             int64_t k, __m512 (&sums)[kRows][kPanels]) {
  const int64_t stride = CeilDiv(k, kPanelDepth) * kPanelDepth * kPanelColumns;
  for (auto& of_row : sums) {
    for (__m512& sum : of_row) sum = _mm512_setzero_ps();
  }
  const auto step = [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    __m512bh pairs[kPanels];
#pragma GCC unroll 8
    for (int j = 0; j < kPanels; ++j) {
      const uint16_t* at = w + j * stride + i * kPanelColumns;
      // Every line of a stream is asked for once, far enough ahead to cover memory's latency.
      if constexpr (kRows <= 2) __builtin_prefetch(at + 16 * 2 * kPanelColumns, 0, 3);
      pairs[j] = (__m512bh)_mm512_loadu_si512(at);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512bh both = BroadcastPair(x[r] + i, count);
#pragma GCC unroll 8
      for (int j = 0; j < kPanels; ++j) {
        sums[r][j] = _mm512_dpbf16_ps(sums[r][j], both, pairs[j]);
      }
    }
  };
  int64_t i = 0;
  for (; i + 2 <= k; i += 2) step(i, 2);
  if (i < k) step(i, 1);
}

template <int kRows, int kPanels>
void LinearTile(const LinearParams& p, int64_t row, int64_t panel) {
  const uint16_t* x[kRows];
  for (int r = 0; r < kRows; ++r) x[r] = static_cast<const uint16_t*>(p.x) + (row + r) * p.w.k;
  __m512 sums[kRows][kPanels];
  PanelSums<kRows, kPanels>(x, p.w.data + panel * PanelStride(p.w), p.w.k, sums);
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kPanels; ++j) StoreColumns(p, row + r, panel + j, sums[r][j]);
  }
}

// The tiles for products of rows that lie anywhere.
struct Bf16Tiles {
  using X = uint16_t;
  static constexpr DType kType = DType::kBFloat16;
  static constexpr int kRows = kLinearRows;
  static constexpr int kPanelsOf(int rows) { return PanelsOf(rows); }
  template <int kTileRows, int kPanels, class Store>
  static void Tile(const uint16_t* const (&x)[kTileRows], const uint16_t* w, int64_t k,
                   Store store) {
    __m512 sums[kTileRows][kPanels];
    PanelSums<kTileRows, kPanels>(x, w, k, sums);
    for (int r = 0; r < kTileRows; ++r) {
      for (int j = 0; j < kPanels; ++j) {
        alignas(64) float columns[kPanelColumns];
        _mm512_store_ps(columns, sums[r][j]);
        store(r, j, columns);
      }
    }
  }
};

// Computes `rows` <= kRows rows of every panel in [begin, end).
template <int kRows>
void LinearRows(const LinearParams& p, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  if (rows < kRows) {
    if constexpr (kRows > 1) LinearRows<kRows - 1>(p, row, rows, begin, end);
    return;
  }
  constexpr int kPanels = PanelsOf(kRows);
  int64_t panel = begin;
  for (; panel + kPanels <= end; panel += kPanels) LinearTile<kRows, kPanels>(p, row, panel);
  for (; panel < end; ++panel) LinearTile<kRows, 1>(p, row, panel);
}

void LinearBf16(const LinearParams& p, Worker worker) {
  CheckBf16Linear(p);
  const Part part = PartOf(p.rows, kLinearRows, CeilDiv(p.w.n, kPanelColumns), 1, worker);
  if (part.rows.end - part.rows.begin <= kLinearRows) {
    LinearRows<kLinearRows>(p, part.rows.begin, part.rows.end - part.rows.begin, part.panels.begin,
                            part.panels.end);
    return;
  }
  // A few panels stay in the second-level cache while every row passes by.
  constexpr int kPanels = PanelsOf(kLinearRows);
  for (int64_t j = part.panels.begin; j < part.panels.end; j += kPanels) {
    const int64_t end = Min(j + kPanels, part.panels.end);
    for (int64_t r = part.rows.begin; r < part.rows.end; r += kLinearRows) {
      LinearRows<kLinearRows>(p, r, Min(kLinearRows, part.rows.end - r), j, end);
    }
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
