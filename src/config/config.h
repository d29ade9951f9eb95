// The configuration of a program: flag > environment > file > default, checked against the schema.
// Called once by each main, on its thread.
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

// The SLUICE_* variables of this process.
Environment SluiceEnvironment();

struct LoadResult {
  Config config;
  Action action = Action::kRun;
  // Where each setting's value comes from, by the setting's name: "--hbm-bytes",
  // "SLUICE_HBM_BYTES", "server.yaml:3" or "default".
  std::map<std::string, std::string> origins;
};

// Reads the configuration of `program` (sluice-server, sluice-prefill, ...).
//
// A setting that `program` does not take is an error as a flag. In the environment and in the file
// it is checked like any other and then passed over, so that the programs of one node can share
// both. The file is that of --config, else of SLUICE_CONFIG. Unknown SLUICE_* variables are errors,
// except those for tests and builds (SLUICE_TEST_*, SLUICE_CUDA, ...) and those
// that Kubernetes sets for a service whose name begins with sluice.
//
// Under kHelp and kVersion nothing is read: `config` is empty. Otherwise every required setting has
// a value. INVALID_ARGUMENT, NOT_FOUND: one sentence naming the setting, where its value came from,
// what was found and what is allowed.
absl::StatusOr<LoadResult> LoadConfig(std::string_view program, std::span<const std::string> args,
                                      const Environment& environment);

// The configuration as a file that gives the same one again, each line with its origin as a
// comment. Settings that `program` does not take are left out.
std::string EffectiveConfigYaml(std::string_view program, const LoadResult& loaded);

}  // namespace sluice
