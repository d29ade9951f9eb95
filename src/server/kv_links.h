// The setting kv_transport: links between the devices of nodes, for caches that are handed over.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/device/device.h"
#include "src/device/peer_link.h"

namespace sluice {

// Returns the largest message of a decode node's links: in shared memory a chunk, of 8 MiB at most.
// Over NCCL, which takes some 100 us to begin a message, it is four times as large. Four messages
// are under way, so that a link takes 32 MiB of /dev/shm, or 128 MiB of HBM at either end.
size_t LinkMessageBytes(const Config& config, const PeerLinks& links);

// Returns null if the setting is grpc. FAILED_PRECONDITION names the setting and what to do: the
// device has no links.
absl::StatusOr<std::unique_ptr<PeerLinks>> NewKvLinks(const Config& config, Device* device);

}  // namespace sluice
