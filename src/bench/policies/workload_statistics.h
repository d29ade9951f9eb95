// What a workload asks of selection, measured under full attention: how well a layer's queries are
// predicted from the input of the layer before, and how fast the blocks that matter change. Printed
// beside every figure of a workload, since it is what the figure depends on.
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
    double cosine = 0;  // of predicted and real queries, mean over heads and steps
    double change = 0;  // of the important blocks from one step to the next, a share of them
    // The share of a step's important blocks that were not important in the first step, by step:
    // what the CPU would be left with if nothing were ever recalled. Empty, and `change` 0, where
    // the layer's blocks were not looked at: of long contexts, those of some layers are.
    std::vector<double> away;
  };
  std::vector<Layer> layers;
  double greedy = 0;  // share of steps in which full's most probable token was the dictated one

  double MeanCosine() const;
  double MeanChange() const;
  std::vector<double> MeanAway() const;
};

// The important blocks of a step, layer and KV head: the `budget_tokens` / block of the context
// with the largest sum of attention, by any query head of the group. `next`: what is dictated.
absl::StatusOr<WorkloadStatistics> MeasureWorkload(const PolicyWorld& world, const Context& context,
                                                   absl::Span<const int32_t> next);

// The share of policy scout's budget that the CPU attends to, by step and layer, if nothing is
// recalled; dense layers have 0.
absl::StatusOr<std::vector<std::vector<double>>> MeasureShares(const PolicyWorld& world,
                                                               const Context& context,
                                                               absl::Span<const int32_t> next);

// The `count` blocks of the highest scores, ascending; lower ones first among equals.
std::vector<int32_t> HighestBlocks(const std::vector<double>& scores, int count);
// The share of `now` that is not in `before`; both ascending. 0 of none.
double ShareAway(const std::vector<int32_t>& before, const std::vector<int32_t>& now);

}  // namespace sluice::bench
