// The policies that a bench compares, by the names that its command line has.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/attention/policy_options.h"

namespace sluice::bench {

// full; of models with latent caches ess, with a schedule of its own or without one of its ideas,
// and offload-naive; of others scout, recall, recall-fetch-all, hgca, oracle; scout without looking
// ahead, without recalls after the first, and without either; hgca-mean, whose beta makes the CPU
// attend to as many tokens as the budget leaves beside the window, on average (hgca_beta.h); and
// the baselines that a selection must beat: ends (the first and the newest blocks) and random.
const std::vector<std::string>& PolicyNames();
// What may follow a name, as in "hgca:beta=0.5:window=512": for help texts.
const std::vector<std::string>& PolicySettings();

// "full,scout,recall:budget=20%": each once, in that order. INVALID_ARGUMENT names the one that is
// wrong and the nearest known.
absl::StatusOr<std::vector<std::string>> ParsePolicies(const std::string& text);

// `options` with what the name means: the policy, and what sets it apart from its siblings. A share
// (budget=20%) is of options.max_context. REQUIRES: a name that ParsePolicies took.
PolicyOptions WithPolicy(PolicyOptions options, const std::string& name);

// Whether the policy's beta is to be found by its mean CPU selection.
bool WantsMeanSelection(const std::string& name);

}  // namespace sluice::bench
