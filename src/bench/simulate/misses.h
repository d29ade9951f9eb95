// How many entries a sequence of policy ess misses in a step, by layer: from the few figures that a
// page gives of a run, from a profile, or from an LRU over drawn selections.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace sluice::bench {

// Returns `count` values from `least` to `most` that rise as a power of their number, and whose
// mean is `mean` as nearly as a power allows. The paths of the topic-drift workload spread layers
// in such a way. REQUIRES: least <= mean <= most, count >= 1.
std::vector<double> SpreadMisses(double mean, double least, double most, int count);

// The selections of one sequence under the topic-drift workload (workload/latent_drift.h), drawn
// without a model: index keys are a path's topics in 64 dimensions, the queries of a few heads are
// the newest token's with a change of each head's own.
struct DrawnSelections {
  int64_t context = 0;  // Tokens before the first step.
  int64_t places = 0;   // KV slots of the sequence in a layer.
  int top_k = 2048;
  int rows = 1;    // Rows of a step: drafts' rows are the tokens that follow.
  int steps = 48;  // Steps that are counted, behind 32 rows of warm-up.
  int paths = 8;
  uint64_t seed = 1;
};

// Returns the mean misses of a step, for each path: selections run through the operator
// UpdateResidency of the CPU kernels, which is the LRU of policy ess. A step's rows are one union.
// INVALID_ARGUMENT: fewer places than a step selects, or a context shorter than `top_k` and the
// warm-up.
absl::StatusOr<std::vector<double>> DrawnMisses(const DrawnSelections& options);

// Puts the misses of paths in the order of a model's layers. REQUIRES: one value for each path.
std::vector<double> MissesByLayer(const std::vector<double>& by_path, int layers);

}  // namespace sluice::bench
