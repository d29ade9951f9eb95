// Measures how well policy clo predicts the queries of each layer: the cosine of the queries that a
// layer is looked ahead with and those that it has then.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/workload/context.h"

namespace sluice {

// Decodes the context's last token and `steps` tokens after it under policy clo with the options of
// `world`, each the most probable one. Returns the mean cosines of the `steps` tokens' rows, by
// layer; the row before them is left out, because its sequence's drift is not known yet. Errors are
// the policy's. REQUIRES: steps >= 1, world.options has no dense layer, and the context and the
// tokens fit world.max_context.
absl::StatusOr<std::vector<double>> MeasurePredictions(const bench::PolicyWorld& world,
                                                       const bench::Context& context, int steps);

}  // namespace sluice
