// The factory of policies: the one place that knows policies by their names. Any thread, before the
// engine runs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policy_options.h"

namespace sluice {

// Makes the policy that options.name names.
// INVALID_ARGUMENT: there is no such policy (the message names the nearest), it is not for the
// model's caches (the message names the policies that are), or an option is out of range.
// UNIMPLEMENTED: the device lacks operators that the policy needs.
// RESOURCE_EXHAUSTED: there is no memory for the policy's tables.
absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewPolicy(const PolicyOptions& options);

// Returns the names of the policies that keep a sequence's host KV cache in DRAM and are for a
// model with these caches.
std::vector<std::string> OffloadingPolicies(const CacheLayout& model);

// Decides what options leave to the profile (PolicyOptions::Ess), once they describe the model and
// have the profile. Callers do this before they use the options for anything else.
void DecideByProfile(const CacheLayout& model, PolicyOptions* options);

// Returns how the policy wants the HBM and DRAM arenas to be divided, for the code that makes the
// pools. Reads neither `options.device` nor the pools.
TierShapes TierShapesOf(const PolicyOptions& options, const CacheLayout& model);

}  // namespace sluice
