// The setting kv_transport: links between the devices of nodes, for caches that are handed over.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/device/device.h"
#include "src/device/peer_link.h"

namespace sluice {

// Returns null if the setting is grpc. FAILED_PRECONDITION names the setting and what to do: the
// device has no links.
absl::StatusOr<std::unique_ptr<PeerLinks>> NewKvLinks(const Config& config, Device* device);

}  // namespace sluice
