// Measures intra-layer overlap (ESS, section 2.2, equation 1): the share of a row's selection in a
// layer that the same sequence's row of the step before had selected in that layer.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/workload/context.h"

namespace sluice::bench {

// Returns, by layer, the mean over `steps` steps of the contexts, one sequence of each, as many as
// fit; empty if none fits. `name` is policy ess or a variant, whose selections are the model's own.
// Steps are not recorded and each list is copied to the host, so this measures no times.
// RESOURCE_EXHAUSTED: no room for the lists.
absl::StatusOr<std::vector<double>> MeasureSelectionOverlap(const PolicyWorld& world,
                                                            const std::string& name,
                                                            const std::vector<Context>& contexts,
                                                            int steps);

}  // namespace sluice::bench
