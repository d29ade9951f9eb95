// The part of sluice-mover-bench that is about latent entries: what policy ess misses in a step.
#pragma once

#include <cstdint>
#include <vector>

#include "src/device/device.h"

namespace sluice::bench {

struct EntryMoversOptions {
  int64_t arena_bytes = 0;
  int rows = 76;
  int misses = 190;  // of a row in a layer
  int layers = 61;   // moves of a run, each with lists of its own
  std::vector<int> workers = {1, 2, 4, 8, 14};
};

// Times both movers and both together, whose rows are divided by their rates, alone and beside
// attention to 2,048 entries a row that lie on the device, and prints the figures. Each ends the
// process if the bytes that it brings are wrong.
void TimeEntryMovers(Device& device, const EntryMoversOptions& options);

}  // namespace sluice::bench
