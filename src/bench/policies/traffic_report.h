// The traffics of `sluice-bench policies --traffic`: which sequences arrive when, and what is
// reported of a run.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/harness/traffic_run.h"
#include "src/bench/policies/policies_options.h"
#include "src/bench/report/report.h"
#include "src/bench/report/run_clock.h"
#include "src/bench/report/subcommand.h"
#include "src/bench/workload/context.h"

namespace sluice::bench {

// Parses "steady,mixed,staggered". In steady traffic all sequences have the longest context and
// decode from begin to end. Mixed is the same with all contexts in turn. In staggered traffic half
// of the sequences are there at the begin and end one after the other; the rest arrive one by one
// and are warmed up while the others decode.
absl::StatusOr<std::vector<std::string>> ParseTraffics(const std::string& text);

// Returns `batch` sequences over contexts of `lengths` lengths, each of which has `distinct`
// contexts, the longest length last. The first of them decodes 4 * `steps` tokens and some more.
// REQUIRES: ParseTraffics returned the name.
std::vector<TrafficSequence> SequencesOf(const std::string& traffic, int batch, size_t lengths,
                                         size_t distinct, int steps);

// A traffic under a policy.
struct TrafficFigures {
  std::string policy, traffic;
  int batch = 0;
  TrafficRun run;
  double idle_share = -1;  // below 0: not traced
};

std::string TrafficHeader();
std::string TrafficLine(const TrafficFigures& figures);
nlohmann::json TrafficJson(const TrafficFigures& figures);

class TrafficReport {
 public:
  // REQUIRES: all arguments outlive this object.
  TrafficReport(const PoliciesBenchOptions& options, const Output& out, Report* report,
                RunClock* clock)
      : options_(options), out_(out), report_(report), clock_(clock) {}

  // Runs every traffic of --traffic at every batch under a policy. `contexts` are of `lengths`
  // lengths, as SequencesOf wants them. A run that fails is reported, and the others go on, unless
  // the device no longer works.
  absl::Status Run(BenchTiers& tiers, PolicyWorld* world, const std::string& policy,
                   const std::vector<Context>& contexts, size_t lengths);

 private:
  // Runs it over `contexts`, and once more under a trace to see in what share of the time no kernel
  // of the model ran.
  absl::StatusOr<TrafficFigures> Measure(const PolicyWorld& world, const std::string& policy,
                                         const std::string& traffic,
                                         const std::vector<TrafficSequence>& sequences,
                                         const std::vector<Context>& contexts) const;

  const PoliciesBenchOptions& options_;
  const Output& out_;
  Report* const report_;
  RunClock* const clock_;
};

}  // namespace sluice::bench
