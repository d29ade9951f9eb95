// Products of rows that lie anywhere with parts of a matrix of panels: HeadLinear and ExpertLinear,
// for any path. `Tiles` are the path's own (FloatTiles, Bf16Tiles): they sum a few rows with a few
// panels. Each output is one chain over k, so that no tiling changes its bits.
#pragma once

#include "kernels/cpu/partition.h"
#include "kernels/cpu/simd_elementwise.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int64_t kMaxPanelsAtOnce = 32;

inline int64_t PanelElementsOf(const WeightMatrix& w) {
  return CeilDiv(w.k, kPanelDepth) * kPanelDepth * kPanelColumns;
}

// Multiplies `rows` <= kRows rows by `panels` panels; calls store(row, panel, columns).
template <class Tiles, int kRows, class Store>
void GatheredRows(const typename Tiles::X* const* x, int64_t rows, const uint16_t* w,
                  int64_t panels, int64_t k, Store store) {
  if (rows < kRows) {
    if constexpr (kRows > 1) GatheredRows<Tiles, kRows - 1>(x, rows, w, panels, k, store);
    return;
  }
  constexpr int kPanels = Tiles::kPanelsOf(kRows);
  const int64_t stride = CeilDiv(k, kPanelDepth) * kPanelDepth * kPanelColumns;
  const typename Tiles::X* of[kRows];
  for (int r = 0; r < kRows; ++r) of[r] = x[r];
  int64_t panel = 0;
  const auto put = [&](int r, int j, const float* columns) { store(r, panel + j, columns); };
  for (; panel + kPanels <= panels; panel += kPanels) {
    Tiles::template Tile<kRows, kPanels>(of, w + panel * stride, k, put);
  }
  for (; panel < panels; ++panel) Tiles::template Tile<kRows, 1>(of, w + panel * stride, k, put);
}

template <class Tiles>
void CheckGathered(const WeightMatrix& w, int32_t n, DType x_type, const char* what) {
  const bool right = w.layout == WeightLayout::kPanel16 && n % kPanelColumns == 0;
  if (!right || x_type != Tiles::kType) KernelCheckFailed(what);
}

template <class Tiles>
void HeadLinear(const HeadLinearParams& p, Worker worker) {
  CheckGathered<Tiles>(p.w, p.n, p.x_type, "head_linear: panels, n a multiple of 16, its own type");
  using X = typename Tiles::X;
  const int64_t of_head = p.n / kPanelColumns, stride = PanelElementsOf(p.w);
  const Part part = PartOf(p.rows, Tiles::kRows, p.heads * of_head, 1, worker);
  for (int64_t first = part.panels.begin; first < part.panels.end;) {
    const int64_t h = first / of_head;
    const int64_t panels = Min((h + 1) * of_head, part.panels.end) - first;
    for (int64_t row = part.rows.begin; row < part.rows.end; row += Tiles::kRows) {
      const X* x[Tiles::kRows];
      const int64_t rows = Min(Tiles::kRows, part.rows.end - row);
      for (int64_t r = 0; r < rows; ++r) {
        x[r] = static_cast<const X*>(p.x) + (row + r) * p.x_stride + h * p.x_head_stride;
      }
      GatheredRows<Tiles, Tiles::kRows>(
          x, rows, p.w.data + first * stride, panels, p.w.k,
          [&](int64_t r, int64_t j, const float* columns) {
            const int64_t column = (first + j - h * of_head) * kPanelColumns;
            const int64_t at = (row + r) * p.y_stride + h * p.y_head_stride + column;
            WriteRounded(p.y, p.y_type, at, columns, kPanelColumns);
          });
    }
    first += panels;
  }
}

// Divides work by experts in order. Each expert is a grid of its pairs, `at_once` at a time, and
// its panels; workers have equal shares of its cells, whole panels each. Calls body(expert, first
// panel, end) for this worker's share.
template <class Body>
void ForEachExpert(const ExpertLinearParams& p, int64_t at_once, Worker worker, Body body) {
  const int64_t of_expert = p.n / kPanelColumns;
  const auto blocks_of = [&](int64_t e) { return CeilDiv(p.begins[e + 1] - p.begins[e], at_once); };
  int64_t total = 0;
  for (int64_t e = 0; e < p.experts; ++e) total += blocks_of(e) * of_expert;
  const Range mine = Share(total, worker);
  int64_t cells = 0;
  for (int64_t e = 0; e < p.experts && cells < mine.end; ++e) {
    const int64_t blocks = blocks_of(e), before = cells;
    cells += blocks * of_expert;
    if (blocks == 0 || cells <= mine.begin) continue;
    const int64_t begin = CeilDiv(Max(mine.begin - before, 0), blocks);
    const int64_t end = Min(CeilDiv(mine.end - before, blocks), of_expert);
    if (begin < end) body(e, begin, end);
  }
}

// Panels that one call of a product takes: they stay in the second-level cache while rows pass by.
inline int64_t PanelsAtOnce(const WeightMatrix& w) {
  return Max(8, Min(kMaxPanelsAtOnce, (512 << 10) / (PanelElementsOf(w) * 2) / 8 * 8));
}

template <class Tiles>
void ExpertLinear(const ExpertLinearParams& p, Worker worker) {
  CheckGathered<Tiles>(p.w, p.n, p.x_type,
                       "expert_linear: panels, n a multiple of 16, its own type");
  using X = typename Tiles::X;
  const int64_t of_expert = p.n / kPanelColumns, stride = PanelElementsOf(p.w);
  const int64_t at_once = PanelsAtOnce(p.w);
  ForEachExpert(p, Tiles::kRows, worker, [&](int64_t e, int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += at_once) {
      for (int64_t i = p.begins[e]; i < p.begins[e + 1]; i += Tiles::kRows) {
        const X* x[Tiles::kRows];
        const int64_t rows = Min(Tiles::kRows, p.begins[e + 1] - i);
        for (int64_t r = 0; r < rows; ++r) {
          x[r] = static_cast<const X*>(p.x) + p.pairs[i + r] / p.pairs_per_row * int64_t{p.w.k};
        }
        GatheredRows<Tiles, Tiles::kRows>(
            x, rows, p.w.data + (e * of_expert + first) * stride, Min(at_once, end - first), p.w.k,
            [&](int64_t r, int64_t j, const float* columns) {
              float* y = p.y + int64_t{p.pairs[i + r]} * p.n + (first + j) * kPanelColumns;
              for (int64_t c = 0; c < kPanelColumns; ++c) y[c] = columns[c];
            });
      }
    }
  });
}

}  // namespace
}  // namespace sluice::kernels::cpu
