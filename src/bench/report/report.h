// What every subcommand of sluice-bench ends with: figures, and all that makes them mean something.
//
// The JSON form ("schema": "sluice-bench/1") has: subcommand, command, revision, machine {cpu,
// cores, memory_bytes}, shape {name: value}, figures [{name, unit, better, median, p10, p90,
// samples, more {name: number}}], details (of the subcommand's own). Figures are what --compare
// compares.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/bench/report/machine.h"
#include "src/bench/report/timing.h"

namespace sluice::bench {

struct Figure {
  std::string name;  // unique in its report
  std::string unit;  // SI, or "1"
  bool lower_is_better = false;
  double median = 0;
  double low = 0;   // 10th percentile
  double high = 0;  // 90th percentile
  int64_t samples = 0;
  std::vector<std::pair<std::string, double>> more;  // beside it: floors, rates, shares
};

struct Report {
  std::string subcommand;
  std::string command;  // as it was typed
  std::vector<std::pair<std::string, std::string>> shape;
  Machine machine;
  std::vector<Figure> figures;
  nlohmann::json details = nlohmann::json::object();
};

// A figure of seconds.
Figure SecondsFigure(std::string name, const Timing& timing);

// The lines above every table: command, machine, shape.
std::string Preamble(const Report& report);

std::string ToJson(const Report& report);
// INVALID_ARGUMENT says what is not as the schema has it.
absl::StatusOr<Report> ParseReport(const std::string& text);

// Writes ToJson to `path`, or to standard output where it is "-".
absl::Status WriteReport(const Report& report, const std::string& path);
absl::StatusOr<Report> ReadReport(const std::string& path);

}  // namespace sluice::bench
