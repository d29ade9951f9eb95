// The subcommands of sluice-bench. Each reads its own flags, prints a table to standard output as
// it obtains figures, and writes the report to the file that --json names.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/bench/report/flags.h"
#include "src/bench/report/report.h"

namespace sluice::bench {

struct Invocation {
  std::string command;            // The whole command line, for reports.
  std::vector<std::string> args;  // The arguments after the subcommand's name.
};

// Each function returns the exit status: 0 after success, 1 if the measurement failed or a computed
// result is wrong, 2 for a bad command line.
int RunKernelBench(const Invocation& invocation);
int RunStepBench(const Invocation& invocation);
int RunRanksBench(const Invocation& invocation);
int RunServeBench(const Invocation& invocation);
int RunIngestBench(const Invocation& invocation);
int RunPoliciesBench(const Invocation& invocation);
int RunSimulate(const Invocation& invocation);
// REQUIRES: `args` names two report files.
int RunCompare(const Invocation& invocation);

// Reads the flags. Returns the exit status if there is nothing more to do: after --help, or after
// an error, which it has printed.
std::optional<int> ReadFlags(Flags& flags, const Invocation& invocation);

// Prints the error and returns 1.
int Fail(const absl::Status& status);
// Prints the problem with the command line and returns 2.
int Usage(const std::string& what);

// Where a subcommand's output goes: the table goes to standard output unless the JSON goes there.
class Output {
 public:
  explicit Output(std::string json_file) : json_file_(std::move(json_file)) {}
  bool table() const { return json_file_ != "-"; }
  void Print(const std::string& text) const;
  // Writes the report and returns the exit status of the subcommand. Called last.
  int Finish(const Report& report) const;

 private:
  const std::string json_file_;  // Empty: no JSON is written.
};

Report NewReport(const std::string& subcommand, const Invocation& invocation);

}  // namespace sluice::bench
