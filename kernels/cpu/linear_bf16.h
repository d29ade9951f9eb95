// The common part of the bf16 matrix products (AVX-512 BF16 and AMX). Compiled with AVX-512 flags:
// internal linkage only.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/partition.h"

namespace sluice::kernels::cpu {
namespace {

inline void CheckBf16Linear(const LinearParams& p) {
  if (p.w.layout != WeightLayout::kPanel16) KernelCheckFailed("linear: weights in panels");
  if (p.x_type != DType::kBFloat16) KernelCheckFailed("linear: bf16 activations");
}

inline int64_t PanelStride(const WeightMatrix& w) {
  return CeilDiv(w.k, kPanelDepth) * kPanelDepth * kPanelColumns;
}

// Adds bias and the old y where asked, and stores one panel's columns of one row.
inline void StoreColumns(const LinearParams& p, int64_t row, int64_t panel, __m512 sums) {
  const int64_t first = panel * kPanelColumns;
  const int64_t count = Min(kPanelColumns, p.w.n - first);
  const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
  float* y = p.y + row * p.w.n + first;
  if (p.bias != nullptr) sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(mask, p.bias + first));
  if (p.accumulate) sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(mask, y));
  _mm512_mask_storeu_ps(y, mask, sums);
}

}  // namespace
}  // namespace sluice::kernels::cpu
