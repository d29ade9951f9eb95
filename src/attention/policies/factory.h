// Policies by their names: the one place that knows them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

// Every name that NewPolicy takes, "full" first.
std::vector<std::string> PolicyNames();

// INVALID_ARGUMENT: no such policy, or an option out of range; UNIMPLEMENTED: the device lacks
// operators that it needs; RESOURCE_EXHAUSTED: no memory for its tables.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewPolicy(const PolicyOptions& options);

}  // namespace sluice
