// Loads the configuration of a program and checks it against the schema. A flag wins over the
// environment, the environment over the file, the file over the default. Each main calls it once,
// on its thread.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "src/config/command_line.h"
#include "src/config/setting.h"

namespace sluice {

// Environment variables by name.
using Environment = std::map<std::string, std::string>;

// Returns the SLUICE_* variables of this process.
Environment SluiceEnvironment();

struct LoadedConfig {
  Config config;
  Action action = Action::kRun;
  // The source of each setting's value, by the setting's name: "--hbm-bytes", "SLUICE_HBM_BYTES",
  // "server.yaml:3" or "default".
  std::map<std::string, std::string> origins;
};

// Reads the configuration of `program` (sluice-server, sluice-prefill, ...).
//
// A setting that `program` does not take is an error as a flag. In the environment and in the file
// it is checked like any other and then ignored, so that the programs of one node can share both.
// --config names the file, else SLUICE_CONFIG does. In the file the settings of a section stand
// under its name (ess: {warm_up: true}). Unknown SLUICE_* variables are errors, except those of
// tests and builds (SLUICE_TEST_*, SLUICE_CUDA, ...) and those that Kubernetes sets for a service
// whose name begins with sluice.
//
// For kHelp and kVersion nothing is read and `config` is empty. Otherwise every required setting
// has a value. INVALID_ARGUMENT, NOT_FOUND: one sentence with the setting, the source of its value,
// what was found and what is allowed.
absl::StatusOr<LoadedConfig> LoadConfig(std::string_view program, std::span<const std::string> args,
                                        const Environment& environment);

// Returns the configuration as a file that gives the same one again. Each line has its source as a
// comment. Settings that `program` does not take are left out.
std::string EffectiveConfigYaml(std::string_view program, const LoadedConfig& loaded);

}  // namespace sluice
