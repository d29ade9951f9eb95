// This makes links of the CUDA device, by NCCL: each has a communicator of two ranks. This header
// needs neither NCCL's nor CUDA's headers.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/device/device.h"
#include "src/device/peer_link.h"

namespace sluice {

// `device` is a CUDA device, and outlives the result and its links. FAILED_PRECONDITION: there is
// no NCCL, also where the program was built without its header.
absl::StatusOr<std::unique_ptr<PeerLinks>> NewNcclPeerLinks(Device* device);

}  // namespace sluice
