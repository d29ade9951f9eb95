// Runs seeds in processes of their own, so that a broken invariant, which ends its process, becomes
// a report like any other.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "tests/sim/scenario.h"
#include "tests/sim/situations.h"

namespace sluice::sim {

// Ends the process. Reports what is wrong with the seed that it runs, and how to reproduce it.
[[noreturn]] void ReportFailure(const std::string& what);

struct RunOptions {
  uint64_t first_seed = 1;
  uint64_t last_seed = 1;
  int jobs = 1;
  bool trace = false;
  bool twice = false;  // runs every seed twice; both runs must be the same
  Plant plant = Plant::kNone;
  std::string policy;  // policy of every node; empty: any
};

// Lies in memory that the processes of a run share.
struct RunResult {
  SituationCounts counts{};
  std::atomic<uint64_t> seeds{0};   // seeds that passed
  std::atomic<bool> failed{false};  // set to end the run
  std::atomic<uint64_t> failed_seed{0};
  char failure[1024] = {};  // report of the first seed that failed
};

// Runs the seeds until one fails. The result stays mapped until the process ends.
const RunResult& RunSeeds(const RunOptions& options);

// Returns the command that runs a seed again.
std::string ReplayCommand(uint64_t seed, const RunOptions& options);

const char* Name(Plant plant);

}  // namespace sluice::sim
