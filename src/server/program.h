// What the mains share: the command line, the configuration, the log, and how a program ends.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/server/signals.h"

namespace sluice {

struct Program {
  std::string_view name;  // "sluice-server"
  // Serves until stopped.
  std::function<absl::Status(const Config&, Signals&)> run;
  // The answer to --print-plan; null where the program has none.
  std::function<absl::StatusOr<std::string>(const Config&)> plan;
};

// Returns the exit status: 0, or 1 after one sentence on stderr.
int Main(const Program& program, int argc, char** argv);

}  // namespace sluice
