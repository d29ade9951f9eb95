// What a caller asks for, free of gRPC, KV and device types. Later facades map onto this too.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "src/request/request_trace.h"
#include "src/request/source_ref.h"
#include "src/request/token_sink.h"
#include "src/sampling/sampling_params.h"

namespace sluice {

// Names where a sequence's caches come from: a transfer, by the id that Reserve minted or by the
// key that the caller chose, or a sequence that was kept. All empty: nothing is handed over.
struct HandoffRef {
  std::string transfer_id;
  std::string tenant;  // scope of rendezvous_key and sequence_id
  std::string rendezvous_key;
  std::string sequence_id;
  // Caches that another node holds. A Puller makes a transfer of it; the engine knows none. At a
  // prefill node, only the room in which the prompt is promised, if it comes with one.
  SourceRef source;
  bool empty() const {
    return transfer_id.empty() && rendezvous_key.empty() && sequence_id.empty() && source.empty();
  }
};

struct Request {
  std::string request_id;  // unique among those alive
  RequestTrace trace;
  HandoffRef handoff;
  // With a transfer: empty, or equal to the manifest's. With a kept sequence: what is appended.
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  absl::Time deadline = absl::InfiniteFuture();
  bool allow_local_prefill = false;
  // How long the sequence is kept once it has ended well; zero: it goes.
  absl::Duration keep;
  std::shared_ptr<TokenSink> sink;
};

}  // namespace sluice
