// The peers that ingest is compared with: KvIngest.Write as the transport alone, with the same
// messages.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "src/service/wire/grpc_service.h"

namespace sluice::bench {

// Returns a service that takes every message and throws it away.
GrpcService NewDiscardPeer();
// Returns a service that copies every message once, to the next position in `target`, which is used
// over and over. REQUIRES: target outlives the service and is larger than any message.
GrpcService NewCopyPeer(absl::Span<uint8_t> target);

}  // namespace sluice::bench
