// HeadLinear and ExpertLinear for a path whose matrix product (`Products::Linear`, in bf16) is best
// with many rows that lie together: rows are first copied together, and results are copied apart
// afterwards. They follow the product's rule of bits.
#pragma once

#include "kernels/cpu/gathered_products.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int64_t kDenseRows = 32;

// 320 KiB.
struct DenseScratch {
  static constexpr int64_t kElements = 128 << 10;
  alignas(64) uint16_t x[kElements];
  alignas(64) float y[kDenseRows * kMaxPanelsAtOnce * kPanelColumns];
};

// Number of rows of k elements that are copied together at a time.
inline int64_t DenseRowsOf(int64_t k) {
  if (k > DenseScratch::kElements) KernelCheckFailed("products of gathered rows: k <= 131072");
  return Min(kDenseRows, DenseScratch::kElements / k);
}

// Multiplies `count` rows, the i-th at x_of(i), by panels [0, panels) of a matrix of k columns at
// `w`; calls store(i, panel, columns, count of columns).
template <class Products, class RowOf, class Store>
void DenseProduct(int64_t count, RowOf x_of, const WeightMatrix& like, const uint16_t* w,
                  int64_t panels, Store store) {
  DenseScratch s;
  const int64_t k = like.k, at_once = PanelsAtOnce(like), rows_at_once = DenseRowsOf(k);
  for (int64_t first = 0; first < panels; first += at_once) {
    const int64_t columns = Min(at_once, panels - first) * kPanelColumns;
    for (int64_t i = 0; i < count; i += rows_at_once) {
      const int64_t rows = Min(rows_at_once, count - i);
      for (int64_t r = 0; r < rows; ++r) {
        __builtin_memcpy(s.x + r * k, x_of(i + r), static_cast<size_t>(k * 2));
      }
      LinearParams p = {};
      p.x = s.x;
      p.w = {w + first * PanelElementsOf(like), static_cast<int32_t>(columns),
             static_cast<int32_t>(k), WeightLayout::kPanel16};
      p.y = s.y;
      p.rows = p.decode_rows = static_cast<int32_t>(rows);
      p.x_type = DType::kBFloat16;
      Products::Linear(p);
      for (int64_t r = 0; r < rows; ++r) store(i + r, first, s.y + r * columns, columns);
    }
  }
}

template <class Products>
void HeadLinearDense(const HeadLinearParams& p, Worker worker) {
  if (p.w.layout != WeightLayout::kPanel16 || p.n % kPanelColumns != 0 ||
      p.x_type != DType::kBFloat16) {
    KernelCheckFailed("head_linear: panels, n a multiple of 16, bf16 activations");
  }
  const int64_t of_head = p.n / kPanelColumns, stride = PanelElementsOf(p.w);
  const Part part = PartOf(p.rows, kDenseRows, p.heads * of_head, 1, worker);
  const int64_t rows = part.rows.end - part.rows.begin;
  for (int64_t first = part.panels.begin; first < part.panels.end && rows > 0;) {
    const int64_t h = first / of_head, in_head = first - h * of_head;
    const int64_t panels = Min((h + 1) * of_head, part.panels.end) - first;
    const auto* x = static_cast<const uint16_t*>(p.x) + h * p.x_head_stride;
    DenseProduct<Products>(
        rows, [&](int64_t i) { return x + (part.rows.begin + i) * p.x_stride; }, p.w,
        p.w.data + first * stride, panels,
        [&](int64_t i, int64_t panel, const float* columns, int64_t count) {
          const int64_t at = (part.rows.begin + i) * p.y_stride + h * p.y_head_stride +
                             (in_head + panel) * kPanelColumns;
          WriteRounded(p.y, p.y_type, at, columns, count);
        });
    first += panels;
  }
}

template <class Products>
void ExpertLinearDense(const ExpertLinearParams& p, Worker worker) {
  if (p.w.layout != WeightLayout::kPanel16 || p.n % kPanelColumns != 0 ||
      p.x_type != DType::kBFloat16) {
    KernelCheckFailed("expert_linear: panels, n a multiple of 16, bf16 activations");
  }
  const int64_t of_expert = p.n / kPanelColumns, stride = PanelElementsOf(p.w);
  ForEachExpert(p, DenseRowsOf(p.w.k), worker, [&](int64_t e, int64_t begin, int64_t end) {
    const int32_t* pairs = p.pairs + p.begins[e];
    const auto* x = static_cast<const uint16_t*>(p.x);
    DenseProduct<Products>(
        p.begins[e + 1] - p.begins[e],
        [&](int64_t i) { return x + pairs[i] / p.pairs_per_row * int64_t{p.w.k}; }, p.w,
        p.w.data + (e * of_expert + begin) * stride, end - begin,
        [&](int64_t i, int64_t panel, const float* columns, int64_t count) {
          float* y = p.y + int64_t{pairs[i]} * p.n + (begin + panel) * kPanelColumns;
          for (int64_t c = 0; c < count; ++c) y[c] = columns[c];
        });
  });
}

}  // namespace
}  // namespace sluice::kernels::cpu
