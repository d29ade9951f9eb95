// The policies that a bench compares, by their names on the command line. The bench sets
// PolicyOptions directly, so it has policies and settings that the server does not offer (the
// oracles, offload-naive, policies without one of their ideas).
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/attention/policy_options.h"

namespace sluice::bench {

// Returns the names. All models: full. Models with latent caches: ess, its variants with one fixed
// overlap schedule or without one of its ideas, and offload-naive. Other models: scout;
// scout-paper, as it is published; scout without layer-ahead prediction, without recalls after the
// first, and without either; recall; recall-paper, as InfiniGen is published; recall-fetch-all,
// which keeps nothing in HBM; hgca; hgca-mean, whose beta makes the CPU attend, on average, to as
// many tokens as the budget leaves beside the window; oracle; oracle-digest, which selects by
// digests; and the baselines that a selection must beat: ends (the first and the newest blocks) and
// random. auto stands for the policy that a node would take (src/model/policy_auto.h).
const std::vector<std::string>& PolicyNames();
// Returns the settings that may follow a name, as in "hgca:beta=0.5:window=512", for help texts.
const std::vector<std::string>& PolicySettings();

// Parses "full,scout,recall:budget=20%": each name at most once, in that order. INVALID_ARGUMENT
// names the wrong one and the nearest known.
absl::StatusOr<std::vector<std::string>> ParsePolicies(const std::string& text);

// Returns `options` with the policy of that name and its settings. A percentage (budget=20%) is a
// share of options.max_context. REQUIRES: ParsePolicies accepted the name, and it is not auto.
PolicyOptions WithPolicy(PolicyOptions options, const std::string& name);

// Returns whether the name is auto, which is resolved to another name before it runs.
bool IsAuto(const std::string& name);

// Returns whether the policy's beta must be found by its mean CPU selection.
bool WantsMeanSelection(const std::string& name);

}  // namespace sluice::bench
