#include "src/bench/report/subcommand.h"

#include <cstdio>

namespace sluice::bench {

std::optional<int> ReadFlags(Flags& flags, const Invocation& invocation) {
  const absl::StatusOr<bool> parsed = flags.Parse(invocation.args);
  if (!parsed.ok()) return Usage(std::string(parsed.status().message()));
  if (*parsed) return std::nullopt;
  std::fputs(flags.Help().c_str(), stdout);
  return 0;
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "sluice-bench: %s\n", std::string(status.message()).c_str());
  return 1;
}

int Usage(const std::string& what) {
  std::fprintf(stderr, "sluice-bench: %s (see --help)\n", what.c_str());
  return 2;
}

void Output::Print(const std::string& text) const {
  if (!table()) return;
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

int Output::Finish(const Report& report) const {
  if (json_file_.empty()) return 0;
  const absl::Status status = WriteReport(report, json_file_);
  return status.ok() ? 0 : Fail(status);
}

Report NewReport(const std::string& subcommand, const Invocation& invocation) {
  Report report;
  report.subcommand = subcommand;
  report.command = invocation.command;
  report.machine = ThisMachine();
  return report;
}

}  // namespace sluice::bench
