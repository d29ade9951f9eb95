#include "tests/sim/runner.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "tests/sim/world.h"

namespace sluice::sim {
namespace {

// A seed takes milliseconds; one that takes this long never ends.
constexpr unsigned kWatchdogSeconds = 120;

// The result, in the process that runs seeds.
RunResult* result = nullptr;
uint64_t current_seed = 0;
Plant current_plant = Plant::kNone;

void OnSignal(int signal) {
  ReportFailure(signal == SIGALRM   ? "it does not end"
                : signal == SIGABRT ? "an invariant is broken, see above"
                                    : "it crashed");
}

uint64_t RunOnce(uint64_t seed, const RunOptions& options) {
  World world(DrawScenario(seed, options.plant, options.policy), options.trace, &result->counts);
  world.Run();
  return world.digest();
}

[[noreturn]] void RunShare(const RunOptions& options, uint64_t share) {
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGALRM}) {
    std::signal(signal, &OnSignal);
  }
  current_plant = options.plant;
  for (uint64_t seed = options.first_seed + share; seed <= options.last_seed && !result->failed;
       seed += static_cast<uint64_t>(options.jobs)) {
    current_seed = seed;
    alarm(kWatchdogSeconds);
    const uint64_t digest = RunOnce(seed, options);
    if (options.twice && RunOnce(seed, options) != digest) {
      ReportFailure("the same seed went two ways");
    }
    ++result->seeds;
  }
  std::_Exit(0);
}

}  // namespace

const char* Name(Plant plant) {
  switch (plant) {
    case Plant::kNone:
      return "none";
    case Plant::kEarlyEvents:
      return "early-events";
    case Plant::kLostCopies:
      return "lost-copies";
    case Plant::kChecksumSkipped:
      return "checksum-skipped";
    case Plant::kTokenTwice:
      return "token-twice";
    case Plant::kTokenLost:
      return "token-lost";
    case Plant::kEndLost:
      return "end-lost";
    case Plant::kEndTwice:
      return "end-twice";
    case Plant::kWakeLost:
      return "wake-lost";
    case Plant::kDeadlineForgotten:
      return "deadline-forgotten";
    case Plant::kPageLeaked:
      return "page-leaked";
    case Plant::kStrayWrite:
      return "stray-write";
  }
  return "?";
}

std::string ReplayCommand(uint64_t seed, const RunOptions& options) {
  return absl::StrCat(
      "build/release/bin/sluice-sim --seed ", seed, " --trace",
      options.plant == Plant::kNone ? "" : absl::StrCat(" --plant ", Name(options.plant)),
      options.policy.empty() ? "" : absl::StrCat(" --policy ", options.policy));
}

void ReportFailure(const std::string& what) {
  if (!result->failed.exchange(true)) {
    result->failed_seed = current_seed;
    std::snprintf(result->failure, sizeof(result->failure), "%s", what.c_str());
  }
  std::fflush(stdout);
  std::_Exit(1);
}

const RunResult& RunSeeds(const RunOptions& options) {
  void* memory =
      mmap(nullptr, sizeof(RunResult), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  SLUICE_CHECK(memory != MAP_FAILED, std::strerror(errno));
  result = new (memory) RunResult;
  std::fflush(stdout);
  std::vector<pid_t> children;
  for (int share = 0; share < options.jobs; ++share) {
    const pid_t child = fork();
    SLUICE_CHECK(child >= 0, "fork: ", std::strerror(errno));
    if (child == 0) {
      // The result holds what an expected failure reports on its way out.
      if (options.plant != Plant::kNone && !options.trace) {
        if (std::freopen("/dev/null", "w", stderr) == nullptr) std::_Exit(1);
      }
      RunShare(options, static_cast<uint64_t>(share));
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if ((!WIFEXITED(status) || WEXITSTATUS(status) != 0) && !result->failed.exchange(true)) {
      std::snprintf(result->failure, sizeof(result->failure), "a process died (status %d)", status);
    }
  }
  return *result;
}

}  // namespace sluice::sim
