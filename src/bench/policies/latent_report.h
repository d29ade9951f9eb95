// The part of the report of `sluice-bench policies` that only models with latent caches and an
// indexer have: intra-layer overlap, the cost of transfers in a step, and forecasts. Texts are
// printed, and JSON is added to the report's details.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/overlap/overlap_run.h"
#include "src/bench/policies/policies_options.h"
#include "src/bench/report/report.h"
#include "src/bench/report/run_clock.h"
#include "src/bench/report/subcommand.h"
#include "src/bench/workload/context.h"

namespace sluice::bench {

class LatentReport {
 public:
  // REQUIRES: all arguments outlive this object.
  LatentReport(const PoliciesBenchOptions& options, const Output& out, Report* report,
               RunClock* clock)
      : options_(options), out_(out), report_(report), clock_(clock) {}

  // Returns the tokens that these runs need beyond the context.
  int Tokens() const;
  // Reports how much of a row's selection the row before had selected. The model's own selection
  // counts, which no policy changes. Does nothing unless one of `policies` fetches entries.
  absl::Status Similarity(BenchTiers& tiers, PolicyWorld* world,
                          const std::vector<std::string>& policies,
                          const std::vector<Context>& contexts);
  // Reports the cost of transfers in a step of the policy, as --overlap and --misses request. Does
  // nothing for a policy without transfers. Adds to `traces` if steps are traced.
  absl::Status Overlap(const PolicyWorld& world, const std::string& policy,
                       const std::vector<Context>& contexts, int batch,
                       std::vector<StepTrace>* traces);
  // Prints the tables that follow the other tables of a context.
  void Finish(const std::vector<PolicyRun>& runs);

 private:
  // Returns the options for one kind of selections: the indexer's own, or forced ones.
  OverlapOptions OptionsFor(bool set) const;

  const PoliciesBenchOptions& options_;
  const Output& out_;
  Report* const report_;
  RunClock* const clock_;
  std::string overlap_text_;  // Printed after the table of runs.
};

}  // namespace sluice::bench
