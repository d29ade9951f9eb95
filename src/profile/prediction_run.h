// Measures how well policy clo predicts the queries of each layer: the cosine of the queries that a
// layer is looked ahead with and those that it has then.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/workload/context.h"

namespace sluice {

// The sums of a layer over rows and query heads.
struct PredictionSums {
  double cosine = 0;
  int64_t count = 0;
  double Mean() const { return count == 0 ? 1 : cosine / static_cast<double>(count); }
};

// Decodes `steps` tokens after the context under policy clo with the options of `world`, each the
// most probable one, and adds the steps' cosines to *sums, [layers]. A layer that is not predicted
// gets none. Errors are the policy's. REQUIRES: the context and the steps fit world.max_context.
absl::Status MeasurePredictions(const bench::PolicyWorld& world, const bench::Context& context,
                                int steps, std::vector<PredictionSums>* sums);

}  // namespace sluice
