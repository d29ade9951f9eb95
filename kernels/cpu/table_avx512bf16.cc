// The path "avx512bf16": AVX-512 with its bf16 dot products; activations are bf16. Attention, norms
// and softmax stay in float32. Compiled with those flags: everything here has internal linkage but
// Avx512Bf16Table().
#include <immintrin.h>

#include "kernels/cpu/cpu_tables.h"
#include "kernels/cpu/linear_bf16.h"
#include "kernels/cpu/simd_avx512.h"
#include "kernels/cpu/simd_moving_average.h"
#include "kernels/cpu/simd_partial.h"
#include "kernels/cpu/simd_scores.h"
#include "kernels/cpu/sparse_items.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int kLinearRows = 6;
constexpr int PanelsOf(int rows) { return rows <= 3 ? 8 : 4; }

// Two neighbouring activations in every lane; `count` < 2 only past an odd k.
inline __m512bh BroadcastPair(const uint16_t* x, int64_t count) {
  uint32_t pair = x[0];
  if (count >= 2) __builtin_memcpy(&pair, x, 4);
  return (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(pair));
}

// kRows rows of kPanels panels: every output is one chain of dot products over k in rising order.
template <int kRows, int kPanels>
void LinearTile(const LinearParams& p, int64_t row, int64_t panel) {
  const int64_t k = p.w.k;
  const int64_t stride = PanelStride(p.w);
  const uint16_t* x = static_cast<const uint16_t*>(p.x) + row * k;
  const uint16_t* w = p.w.data + panel * stride;
  __m512 sums[kRows][kPanels];
  for (auto& of_row : sums) {
    for (__m512& sum : of_row) sum = _mm512_setzero_ps();
  }
  const auto step = [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    __m512bh pairs[kPanels];
#pragma GCC unroll 8
    for (int j = 0; j < kPanels; ++j) {
      const uint16_t* at = w + j * stride + i * kPanelColumns;
      // Far enough ahead to cover memory's latency, every line of a stream once.
      if constexpr (kRows <= 2) __builtin_prefetch(at + 16 * 2 * kPanelColumns, 0, 3);
      pairs[j] = (__m512bh)_mm512_loadu_si512(at);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512bh both = BroadcastPair(x + r * k + i, count);
#pragma GCC unroll 8
      for (int j = 0; j < kPanels; ++j) {
        sums[r][j] = _mm512_dpbf16_ps(sums[r][j], both, pairs[j]);
      }
    }
  };
  int64_t i = 0;
  for (; i + 2 <= k; i += 2) step(i, 2);
  if (i < k) step(i, 1);
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kPanels; ++j) StoreColumns(p, row + r, panel + j, sums[r][j]);
  }
}

// `rows` <= kRows rows of every panel in [begin, end).
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

const KernelTable& Avx512Bf16Table() {
  static constexpr KernelTable table = {
      .name = "avx512bf16",
      .activation_type = DType::kBFloat16,
      .weight_layout = WeightLayout::kPanel16,
      .embedding = Embedding,
      .rms_norm = RmsNorm<Avx512>,
      .linear = LinearBf16,
      .rope_table = RopeTable,
      .rope_append = RopeAppend<Avx512>,
      .attention = Attention<SimdAttention<Avx512>>,
      .attention_merge = AttentionMerge<Avx512>,
      .merge = Merge<Avx512>,
      .silu_mul = SiluMul<Avx512>,
      .sample = Sample,
      .transfer = Transfer,
      .digest = Digest<Avx512>,
      .digest_scores = DigestScores<Avx512>,
      .exact_scores = ExactScores<Avx512>,
      .partial_keys = PartialKeys<Avx512>,
      .partial_scores = PartialScores<Avx512>,
      .top_k = TopK,
      .split = Split,
      .recall_due = RecallDue,
      .recall = Recall,
      .write_through = WriteThrough,
      .sparse_attention = SparseAttention<SimdAttention<Avx512>>,
      .moving_average = MovingAverage<Avx512>,
      .copy_rows = CopyRows,
  };
  return table;
}

}  // namespace sluice::kernels::cpu
