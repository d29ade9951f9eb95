// The one place that knows policies by their names.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

// INVALID_ARGUMENT: there is no such policy (names the nearest), or an option is out of range;
// UNIMPLEMENTED: the device lacks operators that it needs; RESOURCE_EXHAUSTED: no memory for its
// tables.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewPolicy(const PolicyOptions& options);

}  // namespace sluice
