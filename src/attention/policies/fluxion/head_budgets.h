// How much of its cpu segment each query head reads (kernels/fluxion_segments.h): the budgets that
// policy fluxion predicts for every row and layer. The predictor looks at the row's query, at its
// attention to sink and local tokens, and at what was measured for the *anchor*: the end of the
// prompt, and later a row of the answer. Only the engine's thread may call it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "kernels/fluxion_params.h"
#include "src/attention/kv_attention.h"
#include "src/attention/offload/first_queries.h"
#include "src/attention/offload/offload_tier.h"
#include "src/attention/policies/fluxion/anchor_table.h"
#include "src/attention/policies/fluxion/fluxion_options.h"
#include "src/attention/policies/fluxion/growing_anchors.h"
#include "src/attention/policy_options.h"

namespace sluice {

// The lists of a layer's rows that SegmentLists makes, in device memory.
struct SegmentUnits {
  kernels::UnitLists sink{}, local{};
  int32_t *sink_places = nullptr, *local_places = nullptr;
};

class HeadBudgets {
 public:
  using Queries = KvAttention::Queries;

  // RESOURCE_EXHAUSTED: there is no memory for anchors or scratch.
  static absl::StatusOr<std::unique_ptr<HeadBudgets>> Create(const PolicyOptions& options,
                                                             const FluxionShape& shape,
                                                             const OffloadTier* tier);

  // Returns whether budgets depend on anchors and queries. Otherwise they are constants.
  bool predicts() const { return options_.fluxion.predictor != nullptr && !is_fixed(); }
  // Collects the queries of prompts, of which the last one is the anchor's. REQUIRES: predicts().
  FirstQueries& first_queries() { return *first_queries_; }

  // The life of a slot's sequence; nothing happens unless predicts(). Joined takes note of a new
  // one, EndPrompt that its first `tokens` tokens are its prompt, and Left that it leaves, when
  // every step that has it is done: it waits until nothing here reads the sequence's caches.
  void Joined(int slot);
  void EndPrompt(int slot, int64_t tokens, const SelectionHints& hints);
  void Left(int slot);
  // Begins a step with these rows, as AttentionPolicy::BeginStep.
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions);
  // Enqueues that queries of decode rows are kept where a row is an anchor
  // (GrowingAnchors::Keep).
  void Keep(Stream& stream, int layer, const Queries& queries);

  // Enqueues the statistics of the anchor at the end of a slot's prompt in a layer. Without an
  // anchor every head of the sequence reads all of its tokens, until a row of its answer is one.
  void MakeAnchor(Stream& stream, int layer, int slot, const OffloadTier::BulkRow& row);
  // Enqueues the budgets of the rows.
  void Predict(Stream& stream, int layer, const Queries& queries, const SegmentUnits& segments);

  // Return the results of Predict, in device memory.
  const float* budgets() const { return budgets_.as<float>(); }          // [rows][heads][levels]
  const int32_t* streaming() const { return streaming_.as<int32_t>(); }  // [rows][heads]
  // Returns what Predict reads of anchors in a layer. REQUIRES: predicts().
  kernels::FluxionAnchors anchors(int layer) const { return anchors_->Of(layer); }

 private:
  HeadBudgets(const PolicyOptions& options, const FluxionShape& shape, const OffloadTier* tier)
      : options_(options), shape_(shape), tier_(*tier) {}
  absl::Status Allocate();
  absl::Status MakeAnchors();
  absl::Status UploadConstants();
  absl::Status UploadNetwork();
  bool is_fixed() const { return options_.fluxion.fixed_block != 0; }

  const PolicyOptions options_;
  const FluxionShape shape_;
  const OffloadTier& tier_;
  Buffer budgets_, streaming_;
  // Everything below is there only if predicts().
  std::unique_ptr<FirstQueries> first_queries_;
  kernels::FluxionNetwork network_{};
  Buffer network_values_;
  std::optional<AnchorTable> anchors_;
  std::optional<AnchorMeter> meter_;  // for warm-ups, which are on one stream
  Buffer o_, lse_;  // float [2][rows][heads][head_dim], [2][rows][heads]: sink, then local
  std::unique_ptr<GrowingAnchors> growing_;
};

}  // namespace sluice
