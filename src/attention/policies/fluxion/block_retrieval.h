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

namespace sluice {

class BlockRetrieval {
 public:
  using Queries = KvAttention::Queries;

  // Where digests lie in DRAM the device plans alone, and workers choose (HostScores).
  // RESOURCE_EXHAUSTED: there is no memory for the plan or the scores.
  static absl::StatusOr<std::unique_ptr<BlockRetrieval>> Create(const PolicyOptions& options,
                                                                const FluxionShape& shape,
                                                                const OffloadTier* tier);

  // Enqueues the plan for these rows: the size of each list's blocks, and how many each query head
  // selects. The next call overwrites it.
  void Plan(Stream& stream, const Queries& queries, const HeadBudgets& budgets);
  // Return the plan as PlanRetrieval leaves it, in device memory: [lists], and [rows][heads].
  const int32_t* levels() const { return levels_.as<int32_t>(); }
  const int32_t* blocks() const { return blocks_.as<int32_t>(); }

  // Enqueues the plan and the choice for these rows. Returns the units that were chosen, in device
  // memory, which the next call overwrites. `counters` may be null. REQUIRES: digests lie in HBM.
  kernels::UnitLists Choose(Stream& stream, int layer, const Queries& queries,
                            const HeadBudgets& budgets, kernels::SparseCounters* counters);

 private:
  BlockRetrieval(const PolicyOptions& options, const FluxionShape& shape, const OffloadTier* tier)
      : shape_(shape), tier_(*tier), kernels_(options.device->kernels()) {}
  // Enqueues the scores of the planned blocks.
  void Score(Stream& stream, int layer, const Queries& queries);

  const FluxionShape shape_;
  const OffloadTier& tier_;
  KernelSet& kernels_;
  Buffer levels_, volumes_;  // int32 [lists]
  Buffer blocks_;            // int32 [rows][heads]
  // The following are empty where digests lie in DRAM.
  Buffer scores_;          // float [rows * heads][score_stride]
  Buffer units_, counts_;  // int32 [lists][most_units], [lists]
};

}  // namespace sluice
