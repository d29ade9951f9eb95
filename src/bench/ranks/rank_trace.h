// How long the operations of a group of ranks take in traced steps, by their kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "src/device/trace.h"

namespace sluice::bench {

// The operations of the group in a traced step, by rank 0's device.
struct RankTrace {
  double step = 0;        // seconds of a traced step
  double collective = 0;  // seconds in which an operation of the group ran
  double exposed = 0;     // those of them in which no other kernel ran
  double exchange = 0;    // seconds of exchanges
  // Bytes that a rank sends to others in the exchanges of a step; 0: there are none.
  double exchange_bytes = 0;
};

// Returns the means of `steps` steps, of the kernels that begin in [begin, end). exchange_bytes is
// left at 0. A kernel that waits for another rank counts as long as it runs.
RankTrace SumOf(const std::vector<TraceSlice>& slices, absl::Time begin, absl::Time end,
                int64_t steps);

}  // namespace sluice::bench
