// The path "avx2": AVX2 and FMA, float32 activations. Compiled with those flags: everything here
// has internal linkage but Avx2Table().
#include <immintrin.h>

#include "kernels/cpu/cpu_tables.h"
#include "kernels/cpu/gathered_products.h"
#include "kernels/cpu/simd_anchors.h"
#include "kernels/cpu/simd_attention.h"
#include "kernels/cpu/simd_budgets.h"
#include "kernels/cpu/simd_codes.h"
#include "kernels/cpu/simd_hash.h"
#include "kernels/cpu/simd_index_logits.h"
#include "kernels/cpu/simd_level_scores.h"
#include "kernels/cpu/simd_levels.h"
#include "kernels/cpu/simd_linear.h"
#include "kernels/cpu/simd_mla.h"
#include "kernels/cpu/simd_moving_average.h"
#include "kernels/cpu/simd_partial.h"
#include "kernels/cpu/simd_scores.h"
#include "kernels/cpu/sparse_items.h"

namespace sluice::kernels::cpu {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int kWidth = 8;

  // These tiles fit 16 registers.
  static constexpr int kLinearRows = 6;
  static constexpr int kPanelsOf(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
  static constexpr int kQueryRows = 3;
  static constexpr int kScoreVectors = 4;
  static constexpr int kValueVectors = 4;
  static constexpr int kLevelHeads = 2;

  static F Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F Set1(float v) { return _mm256_set1_ps(v); }
  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F Sqrt(F x) { return _mm256_sqrt_ps(x); }
  static F Max(F a, F b) { return _mm256_max_ps(a, b); }
  static F Min(F a, F b) { return _mm256_min_ps(a, b); }
  static F ZeroBelow(F x, float limit, F y) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, Set1(limit), _CMP_LT_OQ), y);
  }
  static F Round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F Pow2(F n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }
  static F LoadBf16(const uint16_t* p) {
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
  }
  // Subnormal e4m3 values, multiples of 2^-9, are the last bits of floats at 2^-6; the others lack
  // 120 of exponent. (The code of NaN counts as 480.)
  static F LoadE4M3(const uint8_t* p) {
    const __m256i v = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256i rest = _mm256_slli_epi32(_mm256_and_si256(v, _mm256_set1_epi32(0x7F)), 20);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(v, _mm256_set1_epi32(0x80)), 24);
    const __m256i normal = _mm256_add_epi32(rest, _mm256_set1_epi32(120 << 23));
    const F least = _mm256_set1_ps(0x1.0p-6f);
    const F subnormal = _mm256_sub_ps(
        _mm256_castsi256_ps(_mm256_or_si256(rest, _mm256_castps_si256(least))), least);
    const __m256i is_normal = _mm256_cmpgt_epi32(rest, _mm256_set1_epi32((1 << 23) - 1));
    const F value =
        _mm256_blendv_ps(subnormal, _mm256_castsi256_ps(normal), _mm256_castsi256_ps(is_normal));
    return _mm256_or_ps(value, _mm256_castsi256_ps(sign));
  }
  static constexpr float kSmallE4M3 = 1;
  static F LoadSmallE4M3(const uint8_t* p) { return LoadE4M3(p); }
  static void StoreBf16(uint16_t* p, F v) {
    alignas(32) float values[kWidth];
    _mm256_store_ps(values, v);
    for (int i = 0; i < kWidth; ++i) p[i] = FloatToBf16(values[i]);
  }
  static void LoadPairs(const uint16_t* p, F& even, F& odd) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xFFFF0000))));
  }
  static float Sum(F v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  static void Sum4(const F (&v)[4], float* out) {
    const F halves = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    _mm_storeu_ps(out,
                  _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
  }
  static float Largest(F v) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
  }

  // Turns 16 keys of `dim` bf16 into columns of floats, by 8 keys x 8 pairs of dimensions at a
  // time.
  static void TransposeKeys(const uint16_t* keys, int64_t dim, float* out) {
    for (int t = 0; t < kHalfChunk; t += 8) {
      for (int64_t d = 0; d < dim; d += 16) TransposeBlock(keys + t * dim + d, dim, out + t, d);
    }
  }

  static void TransposeBlock(const uint16_t* keys, int64_t dim, float* out, int64_t first_dim) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; ++i) {
      a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i * dim));
    }
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
      StorePair(_mm256_permute2x128_si256(a[i], a[i + 4], 0x20), out, first_dim + 2 * i);
      StorePair(_mm256_permute2x128_si256(a[i], a[i + 4], 0x31), out, first_dim + 2 * (i + 4));
    }
  }

  // Stores dimensions d (low halves) and d + 1 (high halves) of 8 keys.
  static void StorePair(__m256i pairs, float* out, int64_t d) {
    Store(out + d * kChunk, _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
    Store(out + (d + 1) * kChunk,
          _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int32_t(0xFFFF0000)))));
  }
};

}  // namespace

const KernelTable& Avx2Table() {
  static constexpr KernelTable table = {
      .name = "avx2",
      .activation_type = DType::kFloat32,
      .weight_layout = WeightLayout::kPanel16,
      .embedding = Embedding,
      .rms_norm = RmsNorm<Avx2>,
      .linear = Linear<Avx2>,
      .rope_table = RopeTable,
      .rope_append = RopeAppend<Avx2>,
      .attention = Attention<SimdAttention<Avx2>>,
      .attention_merge = AttentionMerge<Avx2>,
      .merge = Merge<Avx2>,
      .silu_mul = SiluMul<Avx2>,
      .sample = Sample,
      .transfer = Transfer,
      .digest = Digest<Avx2>,
      .digest_scores = DigestScores<Avx2>,
      .refine_scores = RefineScores<Avx2>,
      .exact_scores = ExactScores<Avx2>,
      .partial_keys = PartialKeys<Avx2>,
      .partial_scores = PartialScores<Avx2>,
      .key_centres = KeyCentres<Avx2>,
      .hash_keys = HashKeys<Avx2>,
      .hash_queries = HashQueries<Avx2>,
      .hash_scores = HashScores,
      .label_lookup = LabelLookup<Avx2>,
      .top_k = TopK,
      .split = Split,
      .recall_due = RecallDue,
      .recall = Recall,
      .bring = Bring,
      .retain = Retain,
      .write_through = WriteThrough,
      .sparse_attention = SparseAttention<SimdAttention<Avx2>>,
      .moving_average = MovingAverage<Avx2>,
      .copy_rows = CopyRows,
      .take_ring = TakeRing,
      .level_digests = LevelDigests<Avx2>,
      .anchor_statistics = AnchorStatistics<Avx2>,
      .predict_budgets = PredictBudgets<Avx2>,
      .plan_retrieval = PlanRetrieval,
      .level_scores = LevelScores<SimdLevelRows<Avx2>>,
      .select_union = SelectUnion,
      .segment_lists = SegmentLists,
      .divide_lists = DivideLists,
      .pull_attention = PullAttention<SparseAttention<SimdAttention<Avx2>>>,
      .merge_parts = MergeParts,
      .latent_append = LatentAppend<Avx2>,
      .index_append = IndexAppend<Avx2>,
      .index_query = IndexQuery<Avx2>,
      .index_logits = IndexLogits<Avx2>,
      .mla_query = MlaQuery<Avx2>,
      .head_linear = HeadLinear<FloatTiles<Avx2>>,
      .sparse_mla = SparseMla<FloatMla<Avx2>>,
      .sparse_mla_merge = SparseMlaMerge<Avx2>,
      .update_residency = UpdateResidency,
      .take_back_residency = TakeBackResidency,
      .route = Route,
      .route_pairs = RoutePairs,
      .expert_linear = ExpertLinear<FloatTiles<Avx2>>,
      .combine = Combine<Avx2>,
      .pack_places = PackPlaces,
      .pack_rows = PackRows,
      .unpack_rows = UnpackRows,
      .unpack_pairs = UnpackPairs,
      .add_parts = AddParts,
      .settle_drafts = SettleDrafts,
      .newest_lists = NewestLists,
  };
  return table;
}

}  // namespace sluice::kernels::cpu
