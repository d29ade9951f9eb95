// What the mains share: the command line, the configuration, the log, and how a program ends.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/config/setting.h"
#include "src/server/signals.h"
#include "src/service/access/access_log.h"

namespace sluice {

struct NodeProgram {
  std::string_view name;  // "sluice-server"
  // Serves until stopped.
  std::function<absl::Status(const Config&, Signals&)> run;
  // The answer to --print-plan; null where the program has none.
  std::function<absl::StatusOr<std::string>(const Config&)> plan;
};

// Ends the process with status 1 once `time` has passed, unless it has ended before: what gives
// back the memory of a GPU that failed may hang.
void ExitWithin(absl::Duration time);

// What the setting access_log asks for; null: off.
absl::StatusOr<std::unique_ptr<AccessLog>> OpenAccessLog(const Config& config);

// Returns the exit status: 0, or 1 after one sentence on stderr.
int Main(const NodeProgram& program, int argc, char** argv);

}  // namespace sluice
