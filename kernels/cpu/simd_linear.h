// Matrix product with float32 activations and bf16 panels for any path (`S`: see simd_math.h).
//
// Every output is one chain over k in rising order, so its bits do not depend on how rows and
// panels are tiled or shared out. A worker streams whole panels; with one row it streams
// kPanelsOf(1) of them side by side, because one chain alone would wait for its own latency.
#pragma once

#include "kernels/cpu/partition.h"
#include "kernels/cpu/simd_math.h"

namespace sluice::kernels::cpu {
namespace {

// Adds bias and the old y where asked, and stores one panel's columns of one row.
inline void StoreColumns(const LinearParams& p, int64_t row, int64_t panel, const float* sums) {
  const int64_t first = panel * kPanelColumns;
  const int64_t count = Min(kPanelColumns, p.w.n - first);
  float* y = p.y + row * p.w.n + first;
  for (int64_t c = 0; c < count; ++c) {
    float v = sums[c];
    if (p.bias != nullptr) v += p.bias[first + c];
    y[c] = p.accumulate ? v + y[c] : v;
  }
}

// Multiplies kRows rows of k elements, which may lie anywhere, by kPanels panels from `w` on; calls
// store(r, j, columns) for row r and panel j.
template <class S, int kRows, int kPanels, class Store>
void PanelTile(const float* const (&x)[kRows], const uint16_t* w, int64_t k, Store store) {
  using F = typename S::F;
  constexpr int kVectors = kPanelColumns / S::kWidth;
  const int64_t panel_elements = CeilDiv(k, kPanelDepth) * kPanelDepth * kPanelColumns;
  F sums[kRows][kPanels][kVectors];
  for (auto& of_row : sums) {
    for (auto& of_panel : of_row) {
      for (F& sum : of_panel) sum = S::Set1(0.0f);
    }
  }
  int64_t i = 0;
  for (; i + 2 <= k; i += 2) {
#pragma GCC unroll 8
    for (int j = 0; j < kPanels; ++j) {
      const uint16_t* pairs = w + j * panel_elements + i * kPanelColumns;
      // Every line of a stream is asked for once, far enough ahead to cover memory's latency.
      if constexpr (kRows == 1) __builtin_prefetch(pairs + 32 * kPanelColumns * 2, 0, 3);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        F even, odd;
        S::LoadPairs(pairs + v * 2 * S::kWidth, even, odd);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          F& sum = sums[r][j][v];
          sum = S::Fma(S::Set1(x[r][i]), even, sum);
          sum = S::Fma(S::Set1(x[r][i + 1]), odd, sum);
        }
      }
    }
  }
  if (i < k) {
    for (int j = 0; j < kPanels; ++j) {
      for (int v = 0; v < kVectors; ++v) {
        F even, odd;
        S::LoadPairs(w + j * panel_elements + i * kPanelColumns + v * 2 * S::kWidth, even, odd);
        for (int r = 0; r < kRows; ++r) {
          sums[r][j][v] = S::Fma(S::Set1(x[r][i]), even, sums[r][j][v]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kPanels; ++j) {
      alignas(64) float columns[kPanelColumns];
      for (int v = 0; v < kVectors; ++v) S::Store(columns + v * S::kWidth, sums[r][j][v]);
      store(r, j, columns);
    }
  }
}

template <class S, int kRows, int kPanels>
void LinearTile(const LinearParams& p, int64_t row, int64_t panel) {
  const int64_t k = p.w.k;
  const int64_t panel_elements = CeilDiv(k, kPanelDepth) * kPanelDepth * kPanelColumns;
  const float* x[kRows];
  for (int r = 0; r < kRows; ++r) x[r] = static_cast<const float*>(p.x) + (row + r) * k;
  PanelTile<S, kRows, kPanels>(
      x, p.w.data + panel * panel_elements, k,
      [&](int r, int j, const float* sums) { StoreColumns(p, row + r, panel + j, sums); });
}

// The tiles of a path with float32 activations, for products of rows that lie anywhere.
template <class S>
struct FloatTiles {
  using X = float;
  static constexpr DType kType = DType::kFloat32;
  static constexpr int kRows = S::kLinearRows;
  static constexpr int kPanelsOf(int rows) { return S::kPanelsOf(rows); }
  template <int kTileRows, int kPanels, class Store>
  static void Tile(const float* const (&x)[kTileRows], const uint16_t* w, int64_t k, Store store) {
    PanelTile<S, kTileRows, kPanels>(x, w, k, store);
  }
};

// Computes kRows rows of every panel in [begin, end).
template <class S, int kRows>
void LinearRows(const LinearParams& p, int64_t row, int64_t begin, int64_t end) {
  constexpr int kPanels = S::kPanelsOf(kRows);
  int64_t panel = begin;
  for (; panel + kPanels <= end; panel += kPanels) LinearTile<S, kRows, kPanels>(p, row, panel);
  for (; panel < end; ++panel) LinearTile<S, kRows, 1>(p, row, panel);
}

// Computes `rows` < kRows rows with the instance of that size.
template <class S, int kRows>
void LinearTailRows(const LinearParams& p, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  if (rows == kRows) {
    LinearRows<S, kRows>(p, row, begin, end);
  } else if constexpr (kRows > 1) {
    LinearTailRows<S, kRows - 1>(p, row, rows, begin, end);
  }
}

template <class S>
void Linear(const LinearParams& p, Worker worker) {
  if (p.w.layout != WeightLayout::kPanel16) KernelCheckFailed("linear: weights in panels");
  if (p.x_type != DType::kFloat32) KernelCheckFailed("linear: float32 activations");
  constexpr int kRows = S::kLinearRows;
  const Part part = PartOf(p.rows, kRows, CeilDiv(p.w.n, kPanelColumns), 1, worker);
  // A block of rows that stays in the second-level cache meets every panel of the part.
  const int64_t block = Max(kRows, (512 << 10) / (p.w.k * 4) / kRows * kRows);
  for (int64_t first = part.rows.begin; first < part.rows.end; first += block) {
    const int64_t last = Min(first + block, part.rows.end);
    if (last - first <= kRows) {
      LinearTailRows<S, kRows>(p, first, last - first, part.panels.begin, part.panels.end);
      continue;
    }
    constexpr int kPanels = S::kPanelsOf(kRows);
    for (int64_t j = part.panels.begin; j < part.panels.end; j += kPanels) {
      const int64_t end = Min(j + kPanels, part.panels.end);
      for (int64_t r = first; r < last; r += kRows) {
        LinearTailRows<S, kRows>(p, r, Min(kRows, last - r), j, end);
      }
    }
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
