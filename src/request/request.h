// What a caller asks for, free of gRPC, KV and device types. Later facades map onto this too.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "src/request/token_sink.h"
#include "src/sampling/sampling_params.h"

namespace sluice {

// Names a transfer: by the id that Reserve minted, or by the key that the caller chose. Both empty:
// nothing is handed over.
struct HandoffRef {
  std::string transfer_id;
  std::string tenant;  // scope of rendezvous_key
  std::string rendezvous_key;
  bool empty() const { return transfer_id.empty() && rendezvous_key.empty(); }
};

struct Request {
  std::string request_id;  // unique among those alive
  HandoffRef handoff;
  std::vector<int32_t> prompt;  // with a handoff: empty, or equal to the manifest's
  SamplingParams sampling;
  absl::Time deadline = absl::InfiniteFuture();
  bool allow_local_prefill = false;
  std::shared_ptr<TokenSink> sink;
};

}  // namespace sluice
