// The path "portable": vectors of four floats, which every x86-64 and arm64 has.
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

struct Portable {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t I __attribute__((vector_size(16)));
  typedef float Unaligned __attribute__((vector_size(16), aligned(4), may_alias));
  static constexpr int kWidth = 4;

  static constexpr int kLinearRows = 3;
  static constexpr int kPanelsOf(int rows) { return rows == 1 ? 2 : 1; }
  static constexpr int kQueryRows = 3;
  static constexpr int kScoreVectors = 4;
  static constexpr int kValueVectors = 4;
  static constexpr int kLevelHeads = 2;

  static F Load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
  static void Store(float* p, F v) { *reinterpret_cast<Unaligned*>(p) = v; }
  static F Set1(float v) { return F{v, v, v, v}; }
  static F Add(F a, F b) { return a + b; }
  static F Sub(F a, F b) { return a - b; }
  static F Mul(F a, F b) { return a * b; }
  static F Div(F a, F b) { return a / b; }
  static F Fma(F a, F b, F c) { return a * b + c; }
  static F Sqrt(F x) {
    return F{__builtin_sqrtf(x[0]), __builtin_sqrtf(x[1]), __builtin_sqrtf(x[2]),
             __builtin_sqrtf(x[3])};
  }
  static F Max(F a, F b) { return a > b ? a : b; }
  static F Min(F a, F b) { return a < b ? a : b; }
  static F ZeroBelow(F x, float limit, F y) { return x < Set1(limit) ? Set1(0.0f) : y; }
  static F Round(F x) {
    const F magic = Set1(0x1.8p23f);
    return (x + magic) - magic;
  }
  static F Pow2(F n) {
    // The sum's low mantissa bits hold n as an integer, biased so that it is an exponent.
    const I bits = reinterpret_cast<I>(n + Set1(0x1.8p23f + 127.0f));
    return reinterpret_cast<F>(bits << 23);
  }
  static F LoadBf16(const uint16_t* p) {
    return F{Bf16ToFloat(p[0]), Bf16ToFloat(p[1]), Bf16ToFloat(p[2]), Bf16ToFloat(p[3])};
  }
  static F LoadE4M3(const uint8_t* p) {
    static constexpr E4M3Values kValues = MakeE4M3Values();
    return F{kValues.of[p[0]], kValues.of[p[1]], kValues.of[p[2]], kValues.of[p[3]]};
  }
  static constexpr float kSmallE4M3 = 1;
  static F LoadSmallE4M3(const uint8_t* p) { return LoadE4M3(p); }
  static void StoreBf16(uint16_t* p, F v) {
    for (int i = 0; i < kWidth; ++i) p[i] = FloatToBf16(v[i]);
  }
  static void LoadPairs(const uint16_t* p, F& even, F& odd) {
    I pairs;
    __builtin_memcpy(&pairs, p, sizeof(pairs));
    even = reinterpret_cast<F>(pairs << 16);
    odd = reinterpret_cast<F>(pairs & int32_t(0xFFFF0000));
  }
  static float Sum(F v) { return (v[0] + v[2]) + (v[1] + v[3]); }
  static void Sum4(const F (&v)[4], float* out) {
    for (int i = 0; i < 4; ++i) out[i] = Sum(v[i]);
  }
  static float Largest(F v) {
    const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
  }
  // Turns 16 keys of `dim` bf16 into columns of floats: out[d * kChunk + t] = keys[t * dim + d].
  static void TransposeKeys(const uint16_t* keys, int64_t dim, float* out) {
    for (int64_t d = 0; d < dim; ++d) {
      for (int64_t t = 0; t < kHalfChunk; ++t) out[d * kChunk + t] = Bf16ToFloat(keys[t * dim + d]);
    }
  }
};

}  // namespace

const KernelTable& PortableTable() {
  static constexpr KernelTable table = {
      .name = "portable",
      .activation_type = DType::kFloat32,
      .weight_layout = WeightLayout::kPanel16,
      .embedding = Embedding,
      .rms_norm = RmsNorm<Portable>,
      .linear = Linear<Portable>,
      .rope_table = RopeTable,
      .rope_append = RopeAppend<Portable>,
      .attention = Attention<SimdAttention<Portable>>,
      .attention_merge = AttentionMerge<Portable>,
      .merge = Merge<Portable>,
      .silu_mul = SiluMul<Portable>,
      .sample = Sample,
      .transfer = Transfer,
      .digest = Digest<Portable>,
      .digest_scores = DigestScores<Portable>,
      .refine_scores = RefineScores<Portable>,
      .exact_scores = ExactScores<Portable>,
      .partial_keys = PartialKeys<Portable>,
      .partial_scores = PartialScores<Portable>,
      .key_centres = KeyCentres<Portable>,
      .hash_keys = HashKeys<Portable>,
      .hash_queries = HashQueries<Portable>,
      .hash_scores = HashScores,
      .label_lookup = LabelLookup<Portable>,
      .top_k = TopK,
      .split = Split,
      .recall_due = RecallDue,
      .recall = Recall,
      .bring = Bring,
      .retain = Retain,
      .write_through = WriteThrough,
      .sparse_attention = SparseAttention<SimdAttention<Portable>>,
      .moving_average = MovingAverage<Portable>,
      .copy_rows = CopyRows,
      .take_ring = TakeRing,
      .level_digests = LevelDigests<Portable>,
      .anchor_statistics = AnchorStatistics<Portable>,
      .predict_budgets = PredictBudgets<Portable>,
      .plan_retrieval = PlanRetrieval,
      .level_scores = LevelScores<SimdLevelRows<Portable>>,
      .select_union = SelectUnion,
      .segment_lists = SegmentLists,
      .divide_lists = DivideLists,
      .pull_attention = PullAttention<SparseAttention<SimdAttention<Portable>>>,
      .merge_parts = MergeParts,
      .latent_append = LatentAppend<Portable>,
      .index_append = IndexAppend<Portable>,
      .index_query = IndexQuery<Portable>,
      .index_logits = IndexLogits<Portable>,
      .mla_query = MlaQuery<Portable>,
      .head_linear = HeadLinear<FloatTiles<Portable>>,
      .sparse_mla = SparseMla<FloatMla<Portable>>,
      .sparse_mla_merge = SparseMlaMerge<Portable>,
      .update_residency = UpdateResidency,
      .take_back_residency = TakeBackResidency,
      .route = Route,
      .route_pairs = RoutePairs,
      .expert_linear = ExpertLinear<FloatTiles<Portable>>,
      .combine = Combine<Portable>,
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
