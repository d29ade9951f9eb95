// How much of its cpu segment each query head reads (kernels/fluxion_segments.h): the budgets that
// policy fluxion predicts for every row and layer. The predictor looks at the row's query, at its
// attention to sink and local tokens, and at what was measured once for the end of the prompt, the
// *anchor*. Only the engine's thread may call it.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/fluxion_params.h"
#include "src/attention/kv_attention.h"
#include "src/attention/offload/first_queries.h"
#include "src/attention/offload/offload_tier.h"
#include "src/attention/policies/fluxion/fluxion_options.h"
#include "src/attention/policy_options.h"

namespace sluice {

// The lists of a layer's rows that SegmentLists makes, in device memory.
struct SegmentUnits {
  kernels::UnitLists sink{}, local{};
  int32_t *sink_places = nullptr, *local_places = nullptr;
};

// Return digests of all levels, which are the tier's first arrays: as operators read and write
// them, and, where they lie in DRAM, as CPU workers read them.
kernels::LevelDigests FluxionDigests(const OffloadTier& tier, int layer);
kernels::LevelDigests HostFluxionDigests(const OffloadTier& tier, int layer);

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

  // Enqueues the statistics of a slot's anchor in a layer. Without an anchor every head of the
  // sequence reads all of its tokens.
  void MakeAnchor(Stream& stream, int layer, int slot, const OffloadTier::BulkRow& row);
  // Enqueues the budgets of the rows.
  void Predict(Stream& stream, int layer, const Queries& queries, const SegmentUnits& segments);

  // Return the results of Predict, in device memory.
  const float* budgets() const { return budgets_.as<float>(); }          // [rows][heads][levels]
  const int32_t* streaming() const { return streaming_.as<int32_t>(); }  // [rows][heads]

 private:
  HeadBudgets(const PolicyOptions& options, const FluxionShape& shape, const OffloadTier* tier)
      : options_(options), shape_(shape), tier_(*tier) {}
  absl::Status Allocate();
  absl::Status UploadConstants();
  absl::Status UploadNetwork();
  bool is_fixed() const { return options_.fluxion.fixed_block != 0; }
  kernels::FluxionAnchors Anchors(int layer) const;
  int64_t kv_numbers() const {
    return int64_t{shape_.kv_heads} * (kernels::kAnchorKvNumbers + shape_.head_dim);
  }
  int64_t head_numbers() const {
    return int64_t{shape_.heads} * (kernels::kAnchorHeadNumbers + shape_.head_dim);
  }
  const PolicyOptions options_;
  const FluxionShape shape_;
  const OffloadTier& tier_;
  Buffer budgets_, streaming_;
  // Everything below is there only if predicts().
  std::unique_ptr<FirstQueries> first_queries_;
  kernels::FluxionNetwork network_{};
  Buffer network_values_;
  // float [layers][slots] of what FluxionAnchors has for a slot
  Buffer anchor_kv_, anchor_heads_, anchor_resident_;
  Buffer no_anchor_;       // float, pinned: not numbers, as many as an anchor has at most
  Buffer anchor_scratch_;  // AnchorStatisticsParams::scratch
  Buffer o_, lse_;         // float [2][rows][heads][head_dim], [2][rows][heads]: sink, then local
};

}  // namespace sluice
