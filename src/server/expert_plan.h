// The part of a plan that is about ranks which divide a model's experts (expert_parallel): what
// each has, what a step exchanges, and how many GPUs of what size the checkpoint takes.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/server/plan.h"

namespace sluice {

// Returns lines about all ranks; `in` is the plan of rank 0. Their weights, workspace and batch are
// as large as rank 0's. INVALID_ARGUMENT: the model cannot be divided so.
absl::StatusOr<std::string> ExpertRanksText(const Config& config, const PlanInput& in);

// Returns a table of numbers of ranks, what a rank's GPU holds with each, and how large it must be
// at least. The plans are made anew, so the errors are those of PlanOf.
absl::StatusOr<std::string> ExpertGpusText(const Config& config);

}  // namespace sluice
