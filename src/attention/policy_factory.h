// The one place that knows policies by their names.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

// INVALID_ARGUMENT: there is no such policy (names the nearest), or an option is out of range;
// UNIMPLEMENTED: the device lacks operators that it needs; RESOURCE_EXHAUSTED: no memory for its
// tables.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewPolicy(const PolicyOptions& options);

// The names of those that keep a sequence's home in DRAM.
std::vector<std::string> OffloadingPolicies();

}  // namespace sluice
