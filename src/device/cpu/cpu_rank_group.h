// This makes groups of ranks of the CPU device: processes (or threads) of one host, which move
// their data through shared memory, on their streams' own threads.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/device/device_health.h"
#include "src/device/rank_group.h"

namespace sluice {

// Joins the ranks. The group's failure fails `health`, which outlives the group. Streams are
// HostStreams with a thread of their own. Returns CheckRankGroupOptions' and HostRanks::Join's
// errors.
absl::StatusOr<std::unique_ptr<RankGroup>> JoinCpuRanks(const RankGroupOptions& options,
                                                        DeviceHealth* health);

}  // namespace sluice
