// The report that every subcommand of sluice-bench produces: its figures, and the machine, command
// and shape that they were measured with.
//
// The JSON form ("schema": "sluice-bench/1") has: subcommand, command, revision, machine {cpu,
// cores, memory_bytes}, shape {name: value}, figures [{name, unit, better, median, p10, p90,
// samples, more {name: number}}] and details, whose content each subcommand defines. --compare
// compares the figures.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/timing.h"
#include "src/bench/report/machine.h"

namespace sluice::bench {

struct Figure {
  std::string name;  // Unique in its report.
  std::string unit;  // An SI unit, or "1".
  bool lower_is_better = false;
  double median = 0;
  double low = 0;   // 10th percentile
  double high = 0;  // 90th percentile
  int64_t samples = 0;
  std::vector<std::pair<std::string, double>> more;  // Related numbers: floors, rates, shares.
};

struct Report {
  std::string subcommand;
  std::string command;  // The command line as it was typed.
  std::vector<std::pair<std::string, std::string>> shape;
  Machine machine;
  std::vector<Figure> figures;
  nlohmann::json details = nlohmann::json::object();
};

// Returns a figure in seconds.
Figure SecondsFigure(std::string name, const Timing& timing);

// Returns the lines that stand above every table: command, machine and shape.
std::string Preamble(const Report& report);

std::string ToJson(const Report& report);
// INVALID_ARGUMENT names the part that does not match the schema.
absl::StatusOr<Report> ParseReport(const std::string& text);

// Writes ToJson(report) to `path`, or to standard output if `path` is "-".
absl::Status WriteReport(const Report& report, const std::string& path);
// Does the same with a text that --json asked for. INVALID_ARGUMENT: it cannot be written.
absl::Status WriteJsonText(const std::string& text, const std::string& path);
absl::StatusOr<Report> ReadReport(const std::string& path);

}  // namespace sluice::bench
