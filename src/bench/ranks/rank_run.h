// One rank of sluice-bench ranks loads its part of the model once. For each phase it makes the
// caches and the policy, and either leads the steps (rank 0) or follows them.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "src/base/timing.h"
#include "src/bench/ranks/rank_processes.h"
#include "src/bench/ranks/rank_trace.h"
#include "src/bench/ranks/ranks_options.h"
#include "src/device/rank_group.h"

namespace sluice::bench {

// The measurements of a step of one size.
struct RankStep {
  std::string policy;
  int overlap = 0;    // of --expert-overlap
  int sequences = 0;  // of all ranks
  Timing step;        // seconds
  Timing quiet;       // without the ranks' operations; no samples: one rank has none
};

// Lines that rank 0 says, as JSON: what it runs on, and each measurement as it comes.
struct RankSays {
  std::function<void(const std::vector<std::pair<std::string, std::string>>&)> shape;
  std::function<void(const RankStep&)> step;
  // The trace of an earlier step.
  std::function<void(const RankStep&, const RankTrace&)> trace;
};

// Runs a rank. `quiet` is shared with the other ranks.
absl::Status RunRank(const RanksOptions& options, const RankGroupOptions& group, RankSwitch* quiet,
                     const RankSays& say);

}  // namespace sluice::bench
