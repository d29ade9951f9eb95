// Measures how the share of policy scout's budget that the CPU attends to grows from one recall to
// the next (ScoutAttention, section 3.4). Recall intervals follow from it.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/workload/context.h"

namespace sluice::bench {

// Returns the shares of `steps` steps behind a recall, by layer: of one sequence whose layers all
// recall in the step before the first of these. The sequence decodes ShareTokens(steps) tokens, and
// each step is fed the token that the step before found most probable. Dense layers have 0, and so
// have all layers of a sequence that fits in HBM. Errors are the policy's.
absl::StatusOr<std::vector<std::vector<double>>> MeasureShares(const PolicyWorld& world,
                                                               const Context& context, int steps);

// The working set of a sequence's first step is one of a row whose drift nobody knew. So a sequence
// first decodes as many steps, and recalls in the last one.
constexpr int ShareTokens(int steps) { return 2 * steps; }

}  // namespace sluice::bench
