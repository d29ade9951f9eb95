// The operators as plain functions, one table per path. A path is `reference` (float64, naive) or
// one instruction set of the CPU. Each function computes its share of the work: it is called once
// for every worker index in [0, workers) of one operator, on any threads, in any order; the caller
// waits for all of them before it starts the next operator. A worker needs 1 MiB of stack. Only
// `reference` allocates. The CPU paths take weights in panels only; attention takes a head_dim that
// is a multiple of 16, up to 256, and blocks of a multiple of 16 tokens. A call outside the
// contract ends the process.
#pragma once

#include <vector>

#include "kernels/bring_params.h"
#include "kernels/draft_params.h"
#include "kernels/exchange_params.h"
#include "kernels/fluxion_params.h"
#include "kernels/hash_params.h"
#include "kernels/latent_params.h"
#include "kernels/params.h"
#include "kernels/pull_params.h"
#include "kernels/ring_params.h"
#include "kernels/sparse_params.h"

namespace sluice::kernels {

struct Worker {
  int index;
  int count;
};

struct KernelTable {
  const char* name;  // "reference", "portable", "avx2", "avx512bf16", "amx"
  // type that linear() reads: LinearParams::x_type and every out_type before one
  DType activation_type;
  WeightLayout weight_layout;
  void (*embedding)(const EmbeddingParams&, Worker);
  void (*rms_norm)(const RmsNormParams&, Worker);
  void (*linear)(const LinearParams&, Worker);
  void (*rope_table)(const RopeTableParams&, Worker);
  void (*rope_append)(const RopeAppendParams&, Worker);
  void (*attention)(const AttentionParams&, Worker);
  // The second phase of attention(), for rows whose splits went through AttentionParams::partial.
  void (*attention_merge)(const AttentionParams&, Worker);
  void (*merge)(const MergeParams&, Worker);
  void (*silu_mul)(const SiluMulParams&, Worker);
  void (*sample)(const SampleParams&, Worker);
  void (*transfer)(const TransferParams&, Worker);
  // Sparse attention (kernels/sparse_params.h, kernels/bring_params.h, kernels/hash_params.h).
  void (*digest)(const DigestParams&, Worker);
  void (*digest_scores)(const DigestScoresParams&, Worker);
  void (*refine_scores)(const RefineScoresParams&, Worker);
  void (*exact_scores)(const ExactScoresParams&, Worker);
  void (*partial_keys)(const PartialKeysParams&, Worker);
  void (*partial_scores)(const PartialScoresParams&, Worker);
  void (*key_centres)(const KeyCentresParams&, Worker);
  void (*hash_keys)(const HashKeysParams&, Worker);
  void (*hash_queries)(const HashQueriesParams&, Worker);
  void (*hash_scores)(const HashScoresParams&, Worker);
  void (*label_lookup)(const LabelLookupParams&, Worker);
  void (*top_k)(const TopKParams&, Worker);
  void (*split)(const SplitParams&, Worker);
  void (*recall_due)(const RecallDueParams&, Worker);
  void (*recall)(const RecallParams&, Worker);
  void (*bring)(const BringParams&, Worker);
  void (*retain)(const RetainParams&, Worker);
  void (*write_through)(const WriteThroughParams&, Worker);
  void (*sparse_attention)(const SparseAttentionParams&, Worker);
  void (*moving_average)(const MovingAverageParams&, Worker);
  void (*copy_rows)(const CopyRowsParams&, Worker);
  // Units out of a ring that CPU workers fill (kernels/ring_params.h). Worker 0 alone takes them.
  void (*take_ring)(const TakeRingParams&, Worker);
  // Fluxion (kernels/fluxion_params.h).
  void (*level_digests)(const LevelDigestsParams&, Worker);
  void (*anchor_statistics)(const AnchorStatisticsParams&, Worker);
  void (*predict_budgets)(const PredictBudgetsParams&, Worker);
  void (*plan_retrieval)(const PlanRetrievalParams&, Worker);
  // The blocks of all lists that have scores are counted through, and of all n of them worker i of
  // w computes those from n * i / w on and before n * (i + 1) / w, so that a caller with one list
  // can ask for a part of it.
  void (*level_scores)(const LevelScoresParams&, Worker);
  void (*select_union)(const SelectUnionParams&, Worker);
  void (*segment_lists)(const SegmentListsParams&, Worker);
  void (*divide_lists)(const DivideListsParams&, Worker);
  // Parts of lists that a device pulls (kernels/pull_params.h). Worker 0 alone is all the pullers.
  void (*pull_attention)(const PullAttentionParams&, Worker);
  void (*merge_parts)(const MergePartsParams&, Worker);
  // Latent attention and experts (kernels/latent_params.h). Where a second phase is named, all
  // workers finish the first before any begins the second.
  void (*latent_append)(const LatentAppendParams&, Worker);
  void (*index_append)(const IndexAppendParams&, Worker);
  void (*index_query)(const IndexQueryParams&, Worker);
  void (*index_logits)(const IndexLogitsParams&, Worker);
  void (*mla_query)(const MlaQueryParams&, Worker);
  void (*head_linear)(const HeadLinearParams&, Worker);
  void (*sparse_mla)(const SparseMlaParams&, Worker);
  void (*sparse_mla_merge)(const SparseMlaParams&, Worker);
  void (*update_residency)(const UpdateResidencyParams&, Worker);
  void (*take_back_residency)(const TakeBackResidencyParams&, Worker);
  void (*route)(const RouteParams&, Worker);
  void (*route_pairs)(const RouteParams&, Worker);
  void (*expert_linear)(const ExpertLinearParams&, Worker);
  void (*combine)(const CombineParams&, Worker);
  // Rows to the experts of other ranks and back (kernels/exchange_params.h). The first phase of
  // packing finds the places, and the second of unpacking lists the pairs.
  void (*pack_places)(const PackRowsParams&, Worker);
  void (*pack_rows)(const PackRowsParams&, Worker);
  void (*unpack_rows)(const UnpackRowsParams&, Worker);
  void (*unpack_pairs)(const UnpackRowsParams&, Worker);
  void (*add_parts)(const AddPartsParams&, Worker);
  // Speculation on the device (kernels/draft_params.h).
  void (*settle_drafts)(const SettleDraftsParams&, Worker);
  void (*newest_lists)(const NewestListsParams&, Worker);
};

// Returns every path that this processor can run, slowest first: reference, portable, ..., the
// best.
const std::vector<const KernelTable*>& AvailableKernelTables();

// Returns the names of every path that this build knows, whether or not this processor has it.
const std::vector<const char*>& KnownKernelTables();

// Returns the path of that name, or null where the name is unknown or this processor lacks it.
const KernelTable* FindKernelTable(const char* name);

// Copies rows [0, n) x [0, k) of a row-major bf16 matrix into rows [first_row, first_row + n) of a
// kPanel16 matrix with `total_rows` rows. REQUIRES: `out` holds PanelElements(total_rows, k) zeroed
// elements.
void PackPanels(const uint16_t* w, int32_t n, int32_t k, int32_t first_row, uint16_t* out);

constexpr int64_t PanelElements(int64_t n, int64_t k) {
  return (n + kPanelColumns - 1) / kPanelColumns * kPanelColumns *
         ((k + kPanelDepth - 1) / kPanelDepth * kPanelDepth);
}

}  // namespace sluice::kernels
