// What policy ess makes of its options: whether they hold together, and what its schedules begin
// with. Arithmetic alone.
#pragma once

#include "absl/status/status.h"
#include "src/attention/policies/ess/ess_tier.h"
#include "src/attention/policies/ess/overlap_plan.h"
#include "src/attention/policies/ess/pool_shape.h"
#include "src/attention/policy_options.h"

namespace sluice {

// FAILED_PRECONDITION: the model has no latent caches with an indexer; UNIMPLEMENTED: the device
// has no operators for them; INVALID_ARGUMENT: a setting is out of range, or places are to be
// divided (pool_division.h) and are not set ones or not profiled. Where there is nothing to divide
// the log says so.
absl::Status CheckEssOptions(const PolicyOptions& options);

// INVALID_ARGUMENT: there is no room for one sequence, of a token and the next one.
absl::Status CheckEssHeadroom(const PolicyOptions& options, const EssTier& tier);

// What is expected of steps of at most `decode_rows` rows before anything is seen.
OverlapPlan::Options OverlapOptionsOf(const PolicyOptions& options, const EssPoolShape& shape,
                                      int decode_rows);

}  // namespace sluice
