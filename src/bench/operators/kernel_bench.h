// The part of `sluice-bench kernels` that runs on a device.
#pragma once

#include <string>

#include "src/bench/operators/policy_operators.h"
#include "src/bench/report/subcommand.h"

namespace sluice::bench {

struct PolicyBenchOptions {
  std::string device = "cpu";
  int threads = 1;  // that compute on the CPU
  PolicyShape shape;
  double seconds = 0.3;  // of each figure
  std::string match;     // part of an operator's name
  std::string json;
};

// The exit status.
int RunPolicyOperatorBench(const PolicyBenchOptions& options, Report report);

}  // namespace sluice::bench
