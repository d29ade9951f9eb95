// The command line of sluice-bench simulate.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/policies/ess/schedule.h"
#include "src/bench/report/subcommand.h"
#include "src/bench/simulate/step_model.h"

namespace sluice::bench {

struct SimulateOptions {
  std::string operators, model, json;
  std::vector<std::string> policies = {"full", "ess"};
  std::vector<int64_t> contexts = {32768}, batches;
  double ratio = 0.2;
  int64_t least_places = 6400, block_tokens = 32, answer_tokens = 0, drafts = 0;
  double acceptance = 0.7;
  int64_t hbm_bytes = 0, dram_bytes = 0;  // 0: no limit is set.
  // "drawn", a policy profile's path, or what ParseMisses takes.
  std::string misses = "drawn";
  std::optional<Overlap> schedule;
  double link_gb_per_s = 0;
  ExpertParallel parallel;
  bool extrapolate = false, skip_transfers = false;
  std::vector<std::pair<std::string, double>> scales, constants;
};

// Reads the flags. Returns the exit status if there is nothing to run: after --help, or after an
// error, which has been printed.
std::optional<int> ReadSimulateOptions(const Invocation& invocation, SimulateOptions* options);

// Parses "MEAN" or "MEAN:LEAST:MOST" into misses by layer, spread as SpreadMisses does. Returns an
// empty list for a text that is neither numbers nor colons. INVALID_ARGUMENT: numbers that do not
// rise from LEAST over MEAN to MOST.
absl::StatusOr<std::vector<double>> ParseMisses(const std::string& text);

}  // namespace sluice::bench
