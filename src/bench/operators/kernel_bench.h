// The part of `sluice-bench kernels` that runs on a device.
#pragma once

#include <string>

#include "src/bench/operators/policy_operators.h"
#include "src/bench/report/subcommand.h"

namespace sluice::bench {

struct PolicyBenchOptions {
  std::string device = "cpu";
  int threads = 1;  // Threads that compute on the CPU.
  PolicyShape shape;
  double seconds = 0.3;  // Seconds spent on each figure.
  std::string match;     // Part of the names of the operators to time.
  std::string json;
};

struct StepPointOptions {
  std::string device = "cpu", model, match, json;
  int threads = 1;
  double seconds = 0.3;
  std::vector<int64_t> rows, contexts, misses;
  int64_t sequences = 64;
  double home_gib = 0;
};

// Each returns the exit status.
int RunStepPointBench(const StepPointOptions& options, Report report);
int RunPolicyOperatorBench(const PolicyBenchOptions& options, Report report);

}  // namespace sluice::bench
