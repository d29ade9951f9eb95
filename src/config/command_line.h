// Takes a command line apart: which settings it names with which values, which action it asks for.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "src/config/setting.h"

namespace sluice {

// What a program was asked to do.
enum class Action {
  kRun,
  kHelp,         // print HelpText()
  kVersion,      // print VersionText()
  kCheckConfig,  // print EffectiveConfigYaml()
  kPrintPlan,    // print what fits into the configured memory
};

struct FlagValue {
  const Setting* setting;
  std::string value;
  std::string spelling;  // as it was written, for errors: --no-log-prompts
};

struct CommandLine {
  Action action = Action::kRun;
  std::optional<std::string> config_file;  // --config
  std::vector<FlagValue> flags;            // in order; each setting at most once
};

// Flags are --name VALUE, --name=VALUE, and for booleans --name and --no-name; hyphens and
// underscores in names are the same. --help, -h and --version win over anything else that is there,
// errors too. INVALID_ARGUMENT: an unknown flag (with the nearest known one), one of another
// program, a missing or superfluous value, a flag given twice, an argument that is no flag. `args`
// are argv[1] and what follows.
absl::StatusOr<CommandLine> ParseCommandLine(std::string_view program,
                                             std::span<const std::string> args);

}  // namespace sluice
