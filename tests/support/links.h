// Makes what makes links, for the device of a test.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/device/device.h"
#include "src/device/peer_link.h"

namespace sluice::testing {

// `device` is of TestDevice, and outlives the result.
absl::StatusOr<std::unique_ptr<PeerLinks>> TestPeerLinks(Device* device);

}  // namespace sluice::testing
