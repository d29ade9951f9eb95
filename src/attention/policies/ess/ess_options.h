// Validation of policy ess's options, and what its schedules start from. This file is arithmetic
// alone.
#pragma once

#include "absl/status/status.h"
#include "src/attention/policies/ess/ess_tier.h"
#include "src/attention/policies/ess/overlap_plan.h"
#include "src/attention/policies/ess/pool_shape.h"
#include "src/attention/policy_options.h"

namespace sluice {

// Decides divide_places and prefetch where they are left to the profile. Places are divided if
// their number is set and the profile has curves for it. Entries are fetched ahead, a quarter of
// what a row selects, if the profile has misses of this model and no row is a draft's.
void DecideEssByProfile(int layers, PolicyOptions* options);

// FAILED_PRECONDITION: the model has no latent caches with an indexer. UNIMPLEMENTED: the device
// has no operators for them. INVALID_ARGUMENT: a setting is out of range, or places are to be
// divided (pool_division.h) but their number is not set or no profile covers it. Logs a warning if
// there is nothing to divide.
absl::Status CheckEssOptions(const PolicyOptions& options);

// INVALID_ARGUMENT: the pools cannot hold one sequence of a token and the next one.
absl::Status CheckEssHeadroom(const PolicyOptions& options, const EssTier& tier);

// Returns what is expected of steps of at most `decode_rows` rows before anything is observed.
OverlapPlan::Options OverlapOptionsOf(const PolicyOptions& options, const EssPoolShape& shape,
                                      int decode_rows);

}  // namespace sluice
