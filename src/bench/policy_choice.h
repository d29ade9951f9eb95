// The policies that a bench compares, by the names that its command line has.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/policy_options.h"

namespace sluice {

// full, scout, recall, recall-fetch-all, hgca, oracle, and the baselines that a selection must
// beat: ends (the first and the newest blocks) and random.
const std::vector<std::string>& PolicyNames();

// "full,scout,ends": each once, in that order. INVALID_ARGUMENT names the one that is wrong and the
// nearest known.
absl::StatusOr<std::vector<std::string>> ParsePolicies(const std::string& text);

// `options` with what the name means: the policy, and what sets it apart from its siblings.
// REQUIRES: a name of PolicyNames().
PolicyOptions WithPolicy(PolicyOptions options, const std::string& name);

}  // namespace sluice
