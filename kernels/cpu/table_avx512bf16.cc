// The path "avx512bf16": AVX-512 with its bf16 dot products; activations are bf16. Attention, norms
// and softmax stay in float32. Compiled with those flags: everything here has internal linkage but
// Avx512Bf16Table().
#include <immintrin.h>

#include "kernels/cpu/cpu_tables.h"
#include "kernels/cpu/linear_bf16.h"
#include "kernels/cpu/simd_attention.h"

namespace sluice::kernels::cpu {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int kWidth = 16;

  // Tiles that fit 32 registers.
  static constexpr int kQueryRows = 6;
  static constexpr int kScoreVectors = 2;
  static constexpr int kValueVectors = 4;

  static F Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F Set1(float v) { return _mm512_set1_ps(v); }
  static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm512_div_ps(a, b); }
  static F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F Max(F a, F b) { return _mm512_max_ps(a, b); }
  static F Min(F a, F b) { return _mm512_min_ps(a, b); }
  static F ZeroBelow(F x, float limit, F y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, Set1(limit), _CMP_NLT_UQ), y);
  }
  static F Round(F x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static F Pow2(F n) { return _mm512_scalef_ps(Set1(1.0f), n); }
  static F LoadBf16(const uint16_t* p) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
  }
  static void StoreBf16(uint16_t* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
  }
  static float Sum(F v) { return _mm512_reduce_add_ps(v); }
  static float Largest(F v) { return _mm512_reduce_max_ps(v); }

  // 16 keys of `dim` bf16 to columns of floats, by 16 pairs of dimensions at a time.
  static void TransposeKeys(const uint16_t* keys, int64_t dim, float* out) {
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) TransposeBlock<32>(keys + d, dim, out + d * kChunk);
    if (d < dim) TransposeBlock<16>(keys + d, dim, out + d * kChunk);
  }

  template <int kDims>
  static void TransposeBlock(const uint16_t* keys, int64_t dim, float* out) {
    constexpr __mmask16 kPairs = static_cast<__mmask16>((1u << (kDims / 2)) - 1);
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_epi32(kPairs, keys + i * dim);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
      a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    // Lane l of a[4 i + c] holds pair 4 l + c of keys 4 i .. 4 i + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const __m512i even01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
      const __m512i odd01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xDD);
      const __m512i even23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
      const __m512i odd23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xDD);
      StorePair(_mm512_shuffle_i32x4(even01, even23, 0x88), out, c);
      StorePair(_mm512_shuffle_i32x4(odd01, odd23, 0x88), out, 4 + c);
      if constexpr (kDims == 32) {
        StorePair(_mm512_shuffle_i32x4(even01, even23, 0xDD), out, 8 + c);
        StorePair(_mm512_shuffle_i32x4(odd01, odd23, 0xDD), out, 12 + c);
      }
    }
  }

  // Dimensions 2 * pair (low halves) and 2 * pair + 1 (high halves) of 16 keys.
  static void StorePair(__m512i pairs, float* out, int pair) {
    Store(out + 2 * pair * kChunk, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
    Store(out + (2 * pair + 1) * kChunk,
          _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int32_t(0xFFFF0000)))));
  }
};

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
      .attention = Attention<Avx512>,
      .attention_merge = AttentionMerge<Avx512>,
      .merge = Merge<Avx512>,
      .silu_mul = SiluMul<Avx512>,
      .sample = Sample,
  };
  return table;
}

}  // namespace sluice::kernels::cpu
