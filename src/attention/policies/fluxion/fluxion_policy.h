// Policy `fluxion`: Fluxion. A decode row attends to its first and newest tokens in HBM, and to as
// many blocks of the others as a predictor says that each query head needs, in blocks of a size
// that is chosen for each KV head. Blocks that are selected often have places in HBM, too; of the
// rest the device reads a share over the link while CPU workers attend to the others.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

// Makes the policy from the options of every sparse policy, those of CPU workers and `fluxion`.
// INVALID_ARGUMENT: the message names the option that is out of range. RESOURCE_EXHAUSTED: there is
// no memory for tables or scratch.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewFluxionPolicy(const PolicyOptions& options);

}  // namespace sluice
