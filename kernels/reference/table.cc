#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {

const KernelTable& Table() {
  static constexpr KernelTable table = {
      .name = "reference",
      .activation_type = DType::kFloat32,
      .weight_layout = WeightLayout::kRowMajor,
      .embedding = Embedding,
      .rms_norm = RmsNorm,
      .linear = Linear,
      .rope_table = RopeTable,
      .rope_append = RopeAppend,
      .attention = Attention,
      .attention_merge = AttentionMerge,
      .merge = Merge,
      .silu_mul = SiluMul,
      .sample = Sample,
      .transfer = Transfer,
      .digest = Digest,
      .digest_scores = DigestScores,
      .refine_scores = RefineScores,
      .exact_scores = ExactScores,
      .partial_keys = PartialKeys,
      .partial_scores = PartialScores,
      .key_centres = KeyCentres,
      .hash_keys = HashKeys,
      .hash_queries = HashQueries,
      .hash_scores = HashScores,
      .label_lookup = LabelLookup,
      .top_k = TopK,
      .split = Split,
      .recall_due = RecallDue,
      .recall = Recall,
      .bring = Bring,
      .retain = Retain,
      .write_through = WriteThrough,
      .sparse_attention = SparseAttention,
      .moving_average = MovingAverage,
      .copy_rows = CopyRows,
      .latent_append = LatentAppend,
      .index_append = IndexAppend,
      .index_query = IndexQuery,
      .index_logits = IndexLogits,
      .mla_query = MlaQuery,
      .head_linear = HeadLinear,
      .sparse_mla = SparseMla,
      .sparse_mla_merge = SparseMlaMerge,
      .update_residency = UpdateResidency,
      .route = Route,
      .route_pairs = RoutePairs,
      .expert_linear = ExpertLinear,
      .combine = Combine,
  };
  return table;
}

}  // namespace sluice::kernels::reference
