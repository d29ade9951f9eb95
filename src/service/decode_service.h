// Decode: Generate and Cancel over an Engine. Tokens pass through a bounded TokenStream per call;
// the engine's thread starts a write when none is under way, so no thread ever waits for a reader.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"
#include "src/engine/engine.h"
#include "src/service/grpc_service.h"

namespace sluice {

class Metrics;
class Puller;

struct DecodeServiceOptions {
  uint32_t vocab_size = 0;
  uint32_t max_context = 0;
  // Tokens that a slow reader may leave unread before its sequence is parked.
  size_t stream_capacity = 256;
  // For a caller to take what is left after its sequence has ended; then its call is cancelled, so
  // that one who never reads keeps nothing here.
  absl::Duration linger = absl::Seconds(30);
  // Outlive the service; `metrics` may be null. The engine counts what it ends, this service what
  // never became a sequence.
  Engine* engine = nullptr;
  Metrics* metrics = nullptr;
  // Of requests whose caches another node holds.
  Puller* puller = nullptr;
  // Writes token ids into the log.
  bool log_prompts = false;
};

GrpcService NewDecodeService(const DecodeServiceOptions& options);

}  // namespace sluice
