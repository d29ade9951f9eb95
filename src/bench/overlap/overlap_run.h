// Measures the cost of transfers in a step of policy ess. Steps that fetch and steps that do not
// alternate on the same sequences, with the same selections, under one engine, so that they differ
// only in the transfers (clocks, pages and context lengths are the same).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/base/timing.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/harness/step_trace.h"
#include "src/bench/overlap/overlap_trace.h"
#include "src/bench/overlap/transfer_alone.h"
#include "src/bench/workload/context.h"

namespace sluice::bench {

// The measurements for one number of misses.
struct OverlapLevel {
  std::optional<int> set;                 // Forced misses; null: the indexer's own selections.
  std::vector<double> misses;             // Counted misses per sequence and step, by layer.
  Timing step;                            // Seconds of steps that fetch.
  Timing without;                         // Seconds of steps that do not.
  TransferAlone alone;                    // The same lists transferred alone.
  double rate_seconds = 0;                // Their bytes at the rate of long lists.
  std::optional<TransfersInside> inside;  // Transfers in a traced step that fetches.
  double compute_slowed = 0;  // Time of its other kernels over that in a step that does not fetch.
  std::vector<ComparedKernel> kernels;  // Kernels of both, the most slowed first.
  std::optional<Shelter> shelter;       // From a traced step that does not fetch.

  double exposed() const { return step.median - without.median; }
  // Returns 1 - exposed / the transfers' own time, or 1 if nothing is missed.
  double HiddenOf(double transfer_seconds) const;
  // Returns the seconds of a step's transfers that the layers' compute could hide at best.
  std::optional<double> Coverable() const;
};

struct OverlapRun {
  std::string policy;
  int batch = 0;
  int context = 0;
  double long_rate = 0;  // Bytes/s of long lists transferred alone.
  std::vector<OverlapLevel> levels;
  // Trace of windows that fetch and of one that does not, for each level, if requested.
  StepTrace trace;
};

struct OverlapOptions {
  int steps = 16;  // Steps in a window.
  // Levels in the order in which they are run. Null stands for the indexer's own selections and
  // must be the only level.
  std::vector<std::optional<int>> levels;
  bool trace = true;  // Repeat the run under the trace, in short windows.
};

// Returns the tokens that a run needs beyond the context.
int OverlapTokens(const OverlapOptions& options);

// REQUIRES: `name` is policy ess or one of its variants; batch and contexts as for RunPolicy.
absl::StatusOr<OverlapRun> RunOverlap(const PolicyWorld& world, const std::string& name,
                                      const std::vector<Context>& contexts, int batch,
                                      const OverlapOptions& options);

}  // namespace sluice::bench
