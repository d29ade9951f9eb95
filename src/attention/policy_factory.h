// The one place that knows policies by their names.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

// INVALID_ARGUMENT: there is no such policy (names the nearest), it is not for the model's caches
// (names those that are), or an option is out of range;
// UNIMPLEMENTED: the device lacks operators that it needs; RESOURCE_EXHAUSTED: no memory for its
// tables.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewPolicy(const PolicyOptions& options);

// The names of those that keep a sequence's home in DRAM, and are for a model of these caches.
std::vector<std::string> OffloadingPolicies(const CacheLayout& model);

// How the policy wants its tiers cut, for whoever makes the pools. Reads neither device nor pools.
TierShapes TierShapesOf(const PolicyOptions& options, const CacheLayout& model);

}  // namespace sluice
