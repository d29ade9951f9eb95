// Chooses the blocks of the cpu segment that a row reads: one size of block for each KV head's
// query heads (Fluxion, equation 3), then each query head's best blocks by their digests, and the
// union of these. Only the engine's thread may call it.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/kv_attention.h"
#include "src/attention/offload/offload_tier.h"
#include "src/attention/policies/fluxion/fluxion_options.h"
#include "src/attention/policies/fluxion/head_budgets.h"
#include "src/attention/policies/fluxion/host_scores.h"

namespace sluice {

class BlockRetrieval {
 public:
  using Queries = KvAttention::Queries;

  // `host_scores` is null where digests lie in HBM, and the device scores them. RESOURCE_EXHAUSTED:
  // there is no memory for the scores.
  static absl::StatusOr<std::unique_ptr<BlockRetrieval>> Create(const PolicyOptions& options,
                                                                const FluxionShape& shape,
                                                                const OffloadTier* tier,
                                                                HostScores* host_scores);

  // Enqueues the choice for these rows. Returns the units that were chosen, in device memory, which
  // the next call overwrites. `counters` may be null.
  kernels::UnitLists Choose(Stream& stream, int layer, const Queries& queries,
                            const HeadBudgets& budgets, kernels::SparseCounters* counters);

 private:
  BlockRetrieval(const PolicyOptions& options, const FluxionShape& shape, const OffloadTier* tier,
                 HostScores* host_scores)
      : shape_(shape),
        tier_(*tier),
        host_scores_(host_scores),
        kernels_(options.device->kernels()) {}
  // Enqueues the scores of the planned blocks, [rows * heads][score_stride], and returns them.
  const float* Score(Stream& stream, int layer, const Queries& queries,
                     const kernels::PlanRetrievalParams& plan);

  const FluxionShape shape_;
  const OffloadTier& tier_;
  HostScores* const host_scores_;
  KernelSet& kernels_;
  Buffer levels_, volumes_;  // int32 [lists]
  Buffer blocks_;            // int32 [rows][heads]
  Buffer scores_;            // float [rows * heads][score_stride]; none with host_scores_
  Buffer units_, counts_;    // int32 [lists][most_units], [lists]
};

}  // namespace sluice
