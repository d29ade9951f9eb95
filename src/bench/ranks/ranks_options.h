// The command line of sluice-bench ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/bench/report/subcommand.h"

namespace sluice::bench {

struct RanksOptions {
  std::string device = "cpu", model, kernels = "auto", divide = "tensors", dispatch = "bf16";
  std::string policies_text = "full", json;
  std::vector<std::string> policies;
  bool dummy = false;
  int64_t threads = 0, context = 8192, steps = 40, trace_steps = 4, misses = 0;
  std::vector<int64_t> ranks = {1, 2}, batches = {1, 8, 32}, overlaps = {0};

  bool experts() const { return divide == "experts"; }
  // Returns the sequences of a step of so many ranks: ranks of experts have `batch` each.
  int SequencesOf(int64_t batch, int count) const {
    return static_cast<int>(experts() ? batch * count : batch);
  }
};

// Reads and checks the flags. Returns the exit status if there is nothing more to do.
std::optional<int> ReadRanksOptions(const Invocation& invocation, RanksOptions* options);

}  // namespace sluice::bench
