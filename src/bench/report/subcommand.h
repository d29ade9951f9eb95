// The subcommands of sluice-bench. Each reads its own flags, prints a table to standard output as
// its figures come, and writes the report where --json says.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/bench/report/flags.h"
#include "src/bench/report/report.h"

namespace sluice::bench {

struct Invocation {
  std::string command;            // the whole command line, for reports
  std::vector<std::string> args;  // after the subcommand's name
};

// Exit status: 0; 1: it could not be measured, or what was computed is wrong; 2: a bad command
// line.
int RunKernelBench(const Invocation& invocation);
int RunStepBench(const Invocation& invocation);
int RunServeBench(const Invocation& invocation);
int RunIngestBench(const Invocation& invocation);
int RunPoliciesBench(const Invocation& invocation);
// `args`: two files.
int RunCompare(const Invocation& invocation);

// Reads the flags; the exit status if there is nothing more to do (--help, or an error, which is
// printed).
std::optional<int> ReadFlags(Flags& flags, const Invocation& invocation);

// Prints the error and returns 1.
int Fail(const absl::Status& status);
// Prints what is wrong with the command line and returns 2.
int Usage(const std::string& what);

// The table goes to standard output unless the JSON does.
class Output {
 public:
  explicit Output(std::string json_file) : json_file_(std::move(json_file)) {}
  bool table() const { return json_file_ != "-"; }
  void Print(const std::string& text) const;
  // The last step of a subcommand; returns its exit status.
  int Finish(const Report& report) const;

 private:
  const std::string json_file_;  // empty: none
};

Report NewReport(const std::string& subcommand, const Invocation& invocation);

}  // namespace sluice::bench
