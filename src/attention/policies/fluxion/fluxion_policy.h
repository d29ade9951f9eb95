// Policy `fluxion`: Fluxion. A decode row attends to its first and newest tokens in HBM, and to as
// many blocks of the others as a predictor says that each query head needs, in blocks of a size
// that is chosen for each KV head. Blocks that are selected often have places in HBM, too; of the
// rest the device reads a share over the link while CPU workers attend to the others.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/offload/offload_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

class FluxionPolicy : public OffloadPolicy {
 public:
  using OffloadPolicy::OffloadPolicy;

  // Returns, for tests, the levels that the last step chose in its last sparse layer, [lists], or
  // -1 for a list that read nothing. In device memory.
  virtual const int32_t* levels() const = 0;
};

// Makes the policy from the options of every sparse policy, those of CPU workers and `fluxion`.
// INVALID_ARGUMENT: the message names the option that is out of range. RESOURCE_EXHAUSTED: there is
// no memory for tables or scratch.
absl::StatusOr<std::unique_ptr<FluxionPolicy>> NewFluxionPolicy(const PolicyOptions& options);

}  // namespace sluice
