// The parts that the mains share: command line, configuration, log, and the end of a process.
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
  // Returns the answer to --print-plan; null: the program has none.
  std::function<absl::StatusOr<std::string>(const Config&)> plan;
  // Returns what --check-config says beside the settings, perhaps nothing; null: the program has
  // none. An error is said too: the settings are right even where the model is not here.
  std::function<absl::StatusOr<std::string>(const Config&)> check = nullptr;
};

// Ends the process with status 1 once `time` has passed, unless it has ended before: giving back
// the memory of a GPU that failed may hang.
void ExitWithin(absl::Duration time);

// Opens the log of the setting access_log; null if that is off.
absl::StatusOr<std::unique_ptr<AccessLog>> OpenAccessLog(const Config& config);

// Runs the program. Returns its exit status: 0, or 1 after one sentence on stderr.
int Main(const NodeProgram& program, int argc, char** argv);

}  // namespace sluice
