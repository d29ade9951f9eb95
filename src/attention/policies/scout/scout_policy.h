// Policy `scout`: ScoutAttention. A decode row attends to the blocks with the highest digest
// scores. The device attends to those in HBM with the real query; CPU workers attend to the others
// and begin a layer ahead, with a predicted query. Now and then a layer's missing blocks are
// fetched to HBM.
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

  // Returns, for tests, the lse of the parts of a sparse layer in the last step, [2][rows][heads]:
  // first the device's, then the CPU's. In device memory.
  virtual const float* parts_lse(int layer) const = 0;
};

// Makes the policy from the options of every sparse policy, those of CPU workers and `scout`.
// INVALID_ARGUMENT: the message names the option that is out of range. RESOURCE_EXHAUSTED: there is
// no memory for tables or scratch.
absl::StatusOr<std::unique_ptr<ScoutPolicy>> NewScoutPolicy(const PolicyOptions& options);

}  // namespace sluice
