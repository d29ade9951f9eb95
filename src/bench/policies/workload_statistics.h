// Measures a workload under full attention: how well a layer's queries are predicted from the input
// of the layer before, and how fast the important blocks change. The statistics are printed beside
// every figure of a workload, since the figure depends on them.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/workload/context.h"

namespace sluice::bench {

struct WorkloadStatistics {
  struct Layer {
    double cosine = 0;  // Cosine of predicted and real queries, mean over heads and steps.
    double change = 0;  // Share of the important blocks that changes from one step to the next.
    // The share of a step's important blocks that were not important in the first step, by step:
    // the share that the CPU would have to attend to if nothing were ever recalled. Empty, with
    // `change` 0, if the layer's blocks were not examined: in long contexts only some layers are.
    std::vector<double> away;
  };
  std::vector<Layer> layers;
  double greedy = 0;  // Share of steps in which full's most probable token was the dictated one.

  double MeanCosine() const;
  double MeanChange() const;
  std::vector<double> MeanAway() const;
};

// Measures the workload. The important blocks of a step, layer and KV head are the `budget_tokens`
// / block blocks with the largest sum of attention by any query head of the group. `next` holds the
// dictated tokens.
absl::StatusOr<WorkloadStatistics> MeasureWorkload(const PolicyWorld& world, const Context& context,
                                                   absl::Span<const int32_t> next);

// Returns the `count` blocks with the highest scores, ascending; among equals the lower ones win.
std::vector<int32_t> HighestBlocks(const std::vector<double>& scores, int count);
// Returns the share of `now` that is not in `before`, or 0 if `now` is empty. REQUIRES: both
// ascend.
double ShareAway(const std::vector<int32_t>& before, const std::vector<int32_t>& now);

}  // namespace sluice::bench
