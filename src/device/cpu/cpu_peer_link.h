// Links between processes (or threads) of one host, through shared memory
// (src/device/host_ranks.h). With them the protocol, its failures and its tests run without a GPU.
#pragma once

#include <memory>

#include "src/device/peer_link.h"

namespace sluice {

std::unique_ptr<PeerLinks> NewCpuPeerLinks();

}  // namespace sluice
