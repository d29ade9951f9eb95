// The setting kv_transport: links between the devices of nodes, for caches that are handed over.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/device/device.h"
#include "src/device/peer_link.h"

namespace sluice {

// Returns the largest message of pushes to this node: a chunk, of 8 MiB at most. Four of them are
// under way, so that a link takes 32 MiB of HBM at either end, or of /dev/shm.
size_t PushMessageBytes(const Config& config);
// Returns the largest message of this node's pulls: as of pushes in shared memory. Over NCCL, which
// takes some 100 us to begin a message, it is four chunks, of 32 MiB at most, so that a link takes
// 128 MiB of HBM at either end.
size_t PullMessageBytes(const Config& config, const PeerLinks& links);

// Returns null if the setting is grpc. FAILED_PRECONDITION names the setting and what to do: the
// device has no links.
absl::StatusOr<std::unique_ptr<PeerLinks>> NewKvLinks(const Config& config, Device* device);

}  // namespace sluice
