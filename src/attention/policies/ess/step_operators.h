// What the operators of policy ess are given: the lists and partial results of a step's decode
// rows, and the parameters that read and write them.
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
  // Multiprocessors that fetch for the next step, beside everything that a step does.
  static constexpr int32_t kPrefetchWorkers = 2;

  // For steps of at most `decode_rows` decode rows; what is pointed to outlives it.
  // RESOURCE_EXHAUSTED: no memory for the lists.
  static absl::StatusOr<StepOperators> Create(const PolicyOptions& options, int32_t decode_rows,
                                              const EssTier* tier, const IndexSelection* selection);

  // Gives places to what rows [row, row + rows) have selected; their lists are from `list` on.
  kernels::AdmitParams Admit(int layer, const LatentAttention::Params& a, int32_t row, int32_t list,
                             int32_t rows) const;
  // Moves what Admit has listed in lists [first, first + rows).
  kernels::TransferParams Fetch(int layer, int32_t first, int32_t rows) const;
  // The same of the decode rows' runners-up, for the next step: through lists of their own, which
  // every layer's share. REQUIRES: the option `prefetch`.
  kernels::AdmitParams AdmitRunnersUp(int layer, const LatentAttention::Params& a) const;
  kernels::TransferParams FetchRunnersUp(int layer, int32_t rows) const;
  // Attention of the decode rows over both lists of places, and of the others over what they have
  // selected at home.
  kernels::SparseMlaParams AttendPool(int layer, const LatentAttention::Params& a) const;
  kernels::SparseMlaParams AttendHome(int layer, const LatentAttention::Params& a) const;

  // Entries that the layer's decode rows append, [decode_rows] of them, on their way home; layers
  // one after the other.
  uint8_t* written(int layer) const;
  SelectionCounters& counters() const { return *counters_; }

 private:
  StepOperators(const PolicyOptions& options, int32_t decode_rows, const EssTier* tier,
                const IndexSelection* selection);
  // What one Admit writes: lists are int32 [decode_rows][capacity], counts [decode_rows].
  struct Lists {
    int32_t capacity = 0;
    Buffer resident, arriving, sources, targets;
    Buffer resident_counts, arriving_counts, move_counts;
  };
  kernels::AdmitParams AdmitInto(const Lists& lists, int32_t list, int layer,
                                 const LatentAttention::Params& a, int32_t row, int32_t rows,
                                 kernels::UnitLists selected) const;
  kernels::TransferParams Move(const Lists& lists, int layer, int32_t first, int32_t rows) const;
  kernels::SparseMlaParams Attention(const LatentAttention::Params& a, int32_t first,
                                     int32_t rows) const;

  int32_t decode_rows_;
  int32_t transfer_workers_;
  bool forget_;
  kernels::DType q_type_;
  const EssTier* tier_;
  const IndexSelection* selection_;
  Buffer written_;
  Lists lists_, ahead_;
  Buffer o_, lse_;  // float [decode_rows][heads][rank], [decode_rows][heads]: Attn0's
  Buffer scratch_;
  std::unique_ptr<SelectionCounters> counters_;
};

}  // namespace sluice
