// The path "avx512bf16": AVX-512 with its bf16 dot products; activations are bf16. Attention, norms
// and softmax stay in float32. Compiled with those flags: everything here has internal linkage but
// Avx512Bf16Table().
#include <immintrin.h>

#include "kernels/cpu/cpu_tables.h"
#include "kernels/cpu/gathered_products.h"
#include "kernels/cpu/index_logits_bf16.h"
#include "kernels/cpu/linear_avx512.h"
#include "kernels/cpu/mla_bf16.h"
#include "kernels/cpu/simd_anchors.h"
#include "kernels/cpu/simd_avx512.h"
#include "kernels/cpu/simd_budgets.h"
#include "kernels/cpu/simd_codes.h"
#include "kernels/cpu/simd_hash.h"
#include "kernels/cpu/simd_level_scores.h"
#include "kernels/cpu/simd_levels.h"
#include "kernels/cpu/simd_moving_average.h"
#include "kernels/cpu/simd_partial.h"
#include "kernels/cpu/simd_scores.h"
#include "kernels/cpu/sparse_items.h"

namespace sluice::kernels::cpu {
namespace {

struct Avx512Products {
  static void Linear(const LinearParams& p) { LinearBf16(p, {0, 1}); }
};

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
      .refine_scores = RefineScores<Avx512>,
      .exact_scores = ExactScores<Avx512>,
      .partial_keys = PartialKeys<Avx512>,
      .partial_scores = PartialScores<Avx512>,
      .key_centres = KeyCentres<Avx512>,
      .hash_keys = HashKeys<Avx512>,
      .hash_queries = HashQueries<Avx512>,
      .hash_scores = HashScores,
      .label_lookup = LabelLookup<Avx512>,
      .top_k = TopK,
      .split = Split,
      .recall_due = RecallDue,
      .recall = Recall,
      .bring = Bring,
      .retain = Retain,
      .write_through = WriteThrough,
      .sparse_attention = SparseAttention<SimdAttention<Avx512>>,
      .moving_average = MovingAverage<Avx512>,
      .copy_rows = CopyRows,
      .take_ring = TakeRing,
      .level_digests = LevelDigests<Avx512>,
      .anchor_statistics = AnchorStatistics<Avx512>,
      .predict_budgets = PredictBudgets<Avx512>,
      .plan_retrieval = PlanRetrieval,
      .level_scores = LevelScores<SimdLevelRows<Avx512>>,
      .select_union = SelectUnion,
      .segment_lists = SegmentLists,
      .divide_lists = DivideLists,
      .pull_attention = PullAttention<SparseAttention<SimdAttention<Avx512>>>,
      .merge_parts = MergeParts,
      .latent_append = LatentAppend<Avx512>,
      .index_append = IndexAppend<Avx512>,
      .index_query = IndexQuery<Avx512>,
      .index_logits = IndexLogitsBf16<Avx512Products>,
      .mla_query = MlaQuery<Avx512>,
      .head_linear = HeadLinear<Bf16Tiles>,
      .sparse_mla = SparseMlaBf16<Avx512Products>,
      .sparse_mla_merge = SparseMlaMerge<Avx512>,
      .update_residency = UpdateResidency,
      .take_back_residency = TakeBackResidency,
      .route = Route,
      .route_pairs = RoutePairs,
      .expert_linear = ExpertLinear<Bf16Tiles>,
      .combine = Combine<Avx512>,
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
