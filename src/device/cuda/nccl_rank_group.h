// This makes groups of ranks of the CUDA device, by NCCL. This header needs neither NCCL's nor
// CUDA's headers.
//
// The ranks meet in shared memory (src/device/host_ranks.h), where rank 0 leaves NCCL's id, and
// where each sees the others end. A thread watches them and NCCL; when the group fails it aborts
// NCCL's communicator, so that what runs on the GPU ends, and fails the device. An operation that
// does not end although all ranks live is noticed by the event behind it
// (DeviceHealth::SetStall), within the group's deadline.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/device/device_health.h"
#include "src/device/rank_group.h"

namespace sluice {

// Joins the ranks; the group's failure fails `health`, which outlives the group. Streams are
// CudaStreams. Returns CheckRankGroupOptions' and HostRanks::Join's errors; FAILED_PRECONDITION:
// there is no NCCL, also where the program was built without its header; INTERNAL: NCCL made no
// id; UNAVAILABLE: it made no communicator.
absl::StatusOr<std::unique_ptr<RankGroup>> JoinNcclRanks(const RankGroupOptions& options,
                                                         DeviceHealth* health);

}  // namespace sluice
