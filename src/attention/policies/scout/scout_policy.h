// Policy `scout`: ScoutAttention. A decode row attends to the blocks with the
// highest digest scores; those in HBM are attended to on the device with the real query, the others
// by CPU workers, which began a layer ahead with a predicted one. Now and then a layer's missing
// blocks are brought to HBM.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/offload/co_attention.h"
#include "src/attention/offload/offload_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

class ScoutPolicy : public OffloadPolicy {
 public:
  using OffloadPolicy::OffloadPolicy;

  // For tests: lse of the parts of a sparse layer in the step before, [2][rows][heads] of its rows,
  // the device's, then the CPU's. In device memory.
  virtual const float* parts_lse(int layer) const = 0;
};

// Of the options: every sparse policy's, the CPU workers' and `scout`. INVALID_ARGUMENT names the
// option that is out of range; RESOURCE_EXHAUSTED: no memory for tables or scratch.
absl::StatusOr<std::unique_ptr<ScoutPolicy>> NewScoutPolicy(const PolicyOptions& options);

}  // namespace sluice
