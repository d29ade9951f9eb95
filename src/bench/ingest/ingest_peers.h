// What ingest is compared with: KvIngest.Write as the transport alone, with the same messages.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "src/service/wire/grpc_service.h"

namespace sluice::bench {

// Takes every message and throws it away.
GrpcService NewDiscardPeer();
// Copies every message once, to the next place in `target`, which is used over and over.
// REQUIRES: target outlives it and is larger than any message.
GrpcService NewCopyPeer(absl::Span<uint8_t> target);

}  // namespace sluice::bench
