// A group of ranks whose operations can be left out, to time what a step is without them.
#pragma once

#include <memory>

#include "src/device/rank_group.h"

namespace sluice::bench {

// Returns a group that passes everything on to `group`, but enqueues no operation while *quiet is
// true: results are then wrong, and nothing waits for another rank. Both outlive the result. The
// ranks must be quiet in the same steps. The engine's thread reads *quiet.
std::unique_ptr<RankGroup> QuietRanks(RankGroup* group, const bool* quiet);

}  // namespace sluice::bench
