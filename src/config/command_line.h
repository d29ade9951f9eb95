// Takes a command line apart into the settings that it gives and the action that it asks for.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "src/config/setting.h"

namespace sluice {

// The things that a program can be asked to do.
enum class Action {
  kRun,
  kHelp,         // print HelpText()
  kVersion,      // print VersionText()
  kCheckConfig,  // print EffectiveConfigYaml()
  kPrintPlan,    // print the node's memory plan
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

// Parses `args`, which are argv[1] and what follows. Flags are --name VALUE, --name=VALUE, and for
// booleans --name and --no-name; hyphens and underscores in names are the same. --help, -h and
// --version win over everything else on the line, errors included. INVALID_ARGUMENT: an unknown
// flag (with the nearest known one), a flag of another program, a missing or superfluous value, a
// flag given twice, or an argument that is no flag.
absl::StatusOr<CommandLine> ParseCommandLine(std::string_view program,
                                             std::span<const std::string> args);

}  // namespace sluice
