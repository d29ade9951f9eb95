// What `sluice-bench policies` says of models with latent caches and an indexer, beyond what it
// says of all: intra-layer overlap, what transfers cost a step, forecasts. Texts are printed and
// JSON is added to the report's details.
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
  // All of them outlive this.
  LatentReport(const PoliciesBenchOptions& options, const Output& out, Report* report,
               RunClock* clock)
      : options_(options), out_(out), report_(report), clock_(clock) {}

  // Tokens that these runs need beyond the context.
  int Tokens() const;
  // How much of a row's selection the row before had: of the model's own, which no policy changes.
  // Nothing without a policy that fetches entries among `policies`.
  absl::Status Similarity(BenchTiers& tiers, PolicyWorld* world,
                          const std::vector<std::string>& policies,
                          const std::vector<Context>& contexts);
  // What transfers cost a step of the policy, as --overlap and --misses want it; nothing of one
  // that has none. Adds to `traces` where steps are traced.
  absl::Status Overlap(const PolicyWorld& world, const std::string& policy,
                       const std::vector<Context>& contexts, int batch,
                       std::vector<StepTrace>* traces);
  // Behind the other tables of a context.
  void Finish(const std::vector<PolicyRun>& runs);

 private:
  // Of one kind of selections: the indexer's own, or set.
  OverlapOptions OptionsFor(bool set) const;

  const PoliciesBenchOptions& options_;
  const Output& out_;
  Report* const report_;
  RunClock* const clock_;
  std::string overlap_text_;  // not printed yet: it would be lost in the table of runs
};

}  // namespace sluice::bench
