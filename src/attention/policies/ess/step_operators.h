// The buffers and parameters of policy ess's operators: the lists and partial results of a step's
// decode rows, and the parameter structs that read and write them.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/latent_params.h"
#include "src/attention/attention_policy.h"
#include "src/attention/latent/index_selection.h"
#include "src/attention/offload/selection_counters.h"
#include "src/attention/policies/ess/ess_tier.h"
#include "src/attention/policy_options.h"
#include "src/device/device.h"

namespace sluice {

class StepOperators {
 public:
  // Multiprocessors that fetch for the next step, beside everything else that a step does.
  static constexpr int32_t kPrefetchWorkers = 2;

  // Allocates for steps of at most `decode_rows` decode rows. REQUIRES: `tier` and `selection`
  // outlive the result. RESOURCE_EXHAUSTED: there is no memory for the lists.
  static absl::StatusOr<StepOperators> Create(const PolicyOptions& options, int32_t decode_rows,
                                              const EssTier* tier, const IndexSelection* selection);

  // Returns the parameters of the operator that gives places to what rows [row, row + rows)
  // selected. Their lists begin at `list`. Where sequences may have several rows, the rows are
  // updated in turn, or, where nothing stays in a place, together.
  kernels::UpdateResidencyParams UpdateResidency(int layer, const LatentAttention::Params& a,
                                                 int32_t row, int32_t list, int32_t rows) const;
  // Returns the parameters of the transfer of what that operator put into lists [first, first +
  // rows).
  kernels::TransferParams Fetch(int layer, int32_t first, int32_t rows) const;
  // The same two for the decode rows' runners-up, which are fetched for the next step. They use
  // lists of their own, which all layers share. REQUIRES: the option `prefetch` is above 0.
  kernels::UpdateResidencyParams UpdateRunnersUp(int layer, const LatentAttention::Params& a) const;
  kernels::TransferParams FetchRunnersUp(int layer, int32_t first, int32_t rows) const;
  // AttendPool: attention of the decode rows over both of their lists of places. AttendHome:
  // attention of the other rows, over what they have selected in the home.
  kernels::SparseMlaParams AttendPool(int layer, const LatentAttention::Params& a) const;
  kernels::SparseMlaParams AttendHome(int layer, const LatentAttention::Params& a) const;

  // Returns where the layer's decode rows append their entries, [decode_rows] of them, on the way
  // to the home. The layers follow one another.
  uint8_t* written(int layer) const;
  SelectionCounters& counters() const { return *counters_; }

 private:
  StepOperators(const PolicyOptions& options, int32_t decode_rows, const EssTier* tier,
                const IndexSelection* selection);
  // The results of one UpdateResidency: lists are int32 [decode_rows][capacity], and counts
  // [decode_rows].
  struct Lists {
    int32_t capacity = 0;
    int32_t move_capacity = 0;  // Of the lists of moves.
    Buffer resident, arriving, sources, targets;
    Buffer resident_counts, arriving_counts, move_counts;
  };
  kernels::UpdateResidencyParams UpdateInto(const Lists& lists, int32_t list, int layer,
                                            const LatentAttention::Params& a, int32_t row,
                                            int32_t rows, kernels::UnitLists selected) const;
  kernels::TransferParams Move(const Lists& lists, int layer, int32_t first, int32_t rows) const;
  kernels::SparseMlaParams Attention(const LatentAttention::Params& a, int32_t first,
                                     int32_t rows) const;

  int32_t decode_rows_;
  int32_t rows_per_sequence_;
  int32_t transfer_workers_;
  bool forget_;
  kernels::DType q_type_;
  const EssTier* tier_;
  const IndexSelection* selection_;
  Buffer written_;
  Lists lists_, ahead_;
  // Partial results of Attn0: float [decode_rows][heads][rank], [decode_rows][heads].
  Buffer o_, lse_;
  Buffer scratch_;
  std::unique_ptr<SelectionCounters> counters_;
};

}  // namespace sluice
