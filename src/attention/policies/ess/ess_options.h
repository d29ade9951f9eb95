// Validation of policy ess's options, and what its schedules start from. This file is arithmetic
// alone.
#pragma once

#include "absl/status/status.h"
#include "src/attention/policies/ess/ess_tier.h"
#include "src/attention/policies/ess/overlap_plan.h"
#include "src/attention/policies/ess/pool_shape.h"
#include "src/attention/policy_options.h"

namespace sluice {

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
