// A caller's request, free of gRPC, KV and device types. Every dialect is translated into it.
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
// key that the caller chose, or a kept sequence. If all are empty, nothing is handed over.
struct HandoffRef {
  std::string transfer_id;
  std::string tenant;  // the tenant of rendezvous_key and sequence_id
  std::string rendezvous_key;
  std::string sequence_id;
  // The caches that another node holds. A Puller makes a transfer of them before the engine sees
  // the request. At a prefill node it has only the room in which the prompt is promised, if the
  // request comes with one.
  SourceRef source;
  bool empty() const {
    return transfer_id.empty() && rendezvous_key.empty() && sequence_id.empty() && source.empty();
  }
};

struct Request {
  std::string request_id;  // unique among live requests
  RequestTrace trace;
  HandoffRef handoff;
  // Why a prefill node that was to hand the prompt over did not, in its words. Empty: no node was
  // asked, or one did. Such a prompt counts as one whose transfer failed.
  std::string handoff_error;
  // The prompt. It is empty or equal to the manifest's with a transfer, and the tokens to append
  // with a kept sequence.
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  absl::Time deadline = absl::InfiniteFuture();
  bool allow_local_prefill = false;
  // How long the sequence is kept once it has ended well. Zero: it is not kept.
  absl::Duration keep;
  std::shared_ptr<TokenSink> sink;
};

}  // namespace sluice
