// Intra-layer overlap (ESS, section 2.2, equation 1): of what a row selects in a layer, the share
// that its sequence's row of the step before had selected in that layer.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/workload/context.h"

namespace sluice::bench {

// By layer, the mean over `steps` steps of the contexts, one sequence of each, as many as fit;
// empty where none does. `name`: of policy ess or a sibling, whose selections are the model's own.
// Steps are not recorded, and each list goes to the host: no times are measured here.
// RESOURCE_EXHAUSTED: no room for the lists.
absl::StatusOr<std::vector<double>> MeasureSelectionOverlap(const PolicyWorld& world,
                                                            const std::string& name,
                                                            const std::vector<Context>& contexts,
                                                            int steps);

}  // namespace sluice::bench
