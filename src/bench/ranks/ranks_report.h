// The table and the figures of sluice-bench ranks, and the lines in which rank 0 says its
// measurements to the parent process.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "src/bench/ranks/rank_run.h"
#include "src/bench/ranks/ranks_options.h"
#include "src/bench/report/report.h"

namespace sluice::bench {

// Returns what makes lines of measurements and passes them to `line`.
RankSays SayLines(const std::function<void(const std::string&)>& line);

class RanksReport {
 public:
  // `report` outlives this, and `print` gets the lines of the table.
  RanksReport(const RanksOptions& options, Report* report,
              std::function<void(const std::string&)> print)
      : options_(options), report_(report), print_(std::move(print)) {}

  // Takes in a line of rank 0 of a group of so many ranks. INTERNAL: it is none.
  absl::Status Add(int ranks, const std::string& line);

 private:
  void AddShape(const nlohmann::json& shape);
  void AddStep(int ranks, const nlohmann::json& said);
  void AddTrace(int ranks, const nlohmann::json& said);

  const RanksOptions options_;
  Report* const report_;
  const std::function<void(const std::string&)> print_;
  bool begun_ = false;
  // Tokens per second of one rank, by policy and --batches.
  std::map<std::pair<std::string, int64_t>, double> alone_;
};

}  // namespace sluice::bench
