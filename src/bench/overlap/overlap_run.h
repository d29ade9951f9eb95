// What transfers cost a step of policy ess: steps that fetch and steps that do not, in turn, on the
// same sequences and with the same selections under one engine, so that nothing but the transfers
// tells them apart (clocks, pages and lengths of contexts are the same).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/harness/step_trace.h"
#include "src/bench/overlap/overlap_trace.h"
#include "src/bench/overlap/transfer_alone.h"
#include "src/bench/report/timing.h"
#include "src/bench/workload/context.h"

namespace sluice::bench {

// One number of misses.
struct OverlapLevel {
  std::optional<int> set;                 // null: what the model's own indexer selects
  std::vector<double> misses;             // counted: of a sequence and step, by layer
  Timing step;                            // seconds of steps that fetch
  Timing without;                         // of steps that do not
  TransferAlone alone;                    // the same lists by themselves
  double rate_seconds = 0;                // their bytes at the rate of long lists
  std::optional<TransfersInside> inside;  // of a traced step that fetches
  double compute_slowed = 0;              // of its other kernels, over a step that does not fetch
  std::vector<ComparedKernel> kernels;    // of both, the most slowed first
  std::optional<Shelter> shelter;         // of a traced step that does not fetch

  double exposed() const { return step.median - without.median; }
  // 1 - exposed / the transfers' own time; 1 where nothing is missed.
  double HiddenOf(double transfer_seconds) const;
  // Of a step's transfers, in seconds, what the layers' compute could hide at best.
  std::optional<double> Coverable() const;
};

struct OverlapRun {
  std::string policy;
  int batch = 0;
  int context = 0;
  double long_rate = 0;  // bytes/s of long lists by themselves
  std::vector<OverlapLevel> levels;
  StepTrace trace;  // of windows that fetch and of one that does not, for each level; if wanted
};

struct OverlapOptions {
  int steps = 16;  // of a window
  // In the order in which they follow one another; null: what the indexer selects, then it is the
  // only one.
  std::vector<std::optional<int>> levels;
  bool trace = true;  // the same once more, in short windows, under the trace
};

// Tokens that a run needs beyond the context.
int OverlapTokens(const OverlapOptions& options);

// REQUIRES: a name of policy ess or of its siblings; batch and contexts as RunPolicy has them.
absl::StatusOr<OverlapRun> RunOverlap(const PolicyWorld& world, const std::string& name,
                                      const std::vector<Context>& contexts, int batch,
                                      const OverlapOptions& options);

}  // namespace sluice::bench
