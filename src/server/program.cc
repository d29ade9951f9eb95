#include "src/server/program.h"

#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "src/base/failpoint.h"
#include "src/base/logging.h"
#include "src/config/config.h"
#include "src/config/help.h"
#include "src/service/grpc/grpc_server.h"

// jemalloc reads this. Freed pages go back to the system after its usual 10 s even if the threads
// that freed them sleep; otherwise the memory of one large message would stay with the process.
extern "C" {
const char* malloc_conf = "background_thread:true";
}

namespace sluice {
namespace {

int Fail(std::string_view program, const absl::Status& status) {
  std::fprintf(stderr, "%.*s: %s\n", static_cast<int>(program.size()), program.data(),
               std::string(status.message()).c_str());
  return 1;
}

// Every connection takes a file descriptor. The soft limit, 1024 on most systems, is there for
// programs that use select(); nothing here does.
void TakeFileDescriptors() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  // This fails only where a sandbox forbids it; then the soft limit stays.
  (void)setrlimit(RLIMIT_NOFILE, &limit);
}

// Returns what the program says beside its settings, as comments of the YAML file.
std::string Checked(const NodeProgram& program, const Config& config) {
  if (program.check == nullptr) return "";
  SetUpLogging(LogLevel::kWarn, LogFormat::kText);
  const absl::StatusOr<std::string> said = program.check(config);
  std::string out;
  for (const auto line :
       absl::StrSplit(said.ok() ? *said : std::string(said.status().message()), '\n')) {
    if (!line.empty()) absl::StrAppend(&out, "# ", line, "\n");
  }
  return out;
}

int Print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  if (text.empty() || text.back() != '\n') std::fputc('\n', stdout);
  return std::fflush(stdout) == 0 ? 0 : 1;
}

}  // namespace

void ExitWithin(absl::Duration time) {
  std::thread([time] {
    absl::SleepFor(time);
    std::_Exit(1);
  }).detach();
}

absl::StatusOr<std::unique_ptr<AccessLog>> OpenAccessLog(const Config& config) {
  if (config.access_log() == "off") return nullptr;
  return AccessLog::Open(config.access_log());
}

int Main(const NodeProgram& program, int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  const absl::StatusOr<LoadedConfig> loaded = LoadConfig(program.name, args, SluiceEnvironment());
  if (!loaded.ok()) return Fail(program.name, loaded.status());
  const Config& config = loaded->config;
  switch (loaded->action) {
    case Action::kHelp:
      return Print(HelpText(program.name));
    case Action::kVersion:
      return Print(VersionText(program.name));
    case Action::kCheckConfig:
      return Print(EffectiveConfigYaml(program.name, *loaded) + Checked(program, config));
    case Action::kPrintPlan: {
      // Policies log while they are made; a plan leaves that out.
      SetUpLogging(LogLevel::kWarn, LogFormat::kText);
      const absl::StatusOr<std::string> plan = program.plan(config);
      return plan.ok() ? Print(*plan) : Fail(program.name, plan.status());
    }
    case Action::kRun:
      break;
  }
  SetUpLogging(ParseLogLevel(config.log_level()), ParseLogFormat(config.log_format()));
  RouteLibraryLogs();
  TakeFileDescriptors();
  if (const absl::Status armed = ArmFailpoints(config.failpoints(), config.seed()); !armed.ok()) {
    return Fail(program.name, armed);
  }
  if (!config.failpoints().empty()) {
    Log(LogLevel::kWarn, "failpoints are armed", {{"terms", config.failpoints()}});
  }
  Signals signals;
  const absl::Status status = program.run(config, signals);
  return status.ok() ? 0 : Fail(program.name, status);
}

}  // namespace sluice
