// KvSource: gives decode nodes the prompts in HeldPrompts. Chunks go out as slices of the held
// memory, each written when the reader has room for it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "src/kv/cache_layout.h"
#include "src/prefill/held_prompts.h"
#include "src/prefill/rooms.h"
#include "src/service/wire/grpc_service.h"

namespace sluice {

class Access;
class LinkServer;

struct SourceServiceOptions {
  std::string model_fingerprint;
  CacheLayout layout;
  // Maximum payload of a chunk, unless the reader asks for less.
  uint64_t max_chunk_bytes = uint64_t{4} << 20;
  // Outlives the service.
  HeldPrompts* held = nullptr;
  // Links to decode nodes; outlives the service. Null: all goes over gRPC (kv_transport grpc). They
  // need `held` to have an arena that their device reaches.
  LinkServer* links = nullptr;
  // The rooms in which prompts are promised. Null if the node has none; AwaitPrompt then fails.
  std::shared_ptr<Rooms> rooms;
  // The longest that one AwaitPrompt waits.
  absl::Duration longest_wait = absl::Seconds(5);
  // Null without TLS.
  const Access* access = nullptr;
};

GrpcService NewSourceService(SourceServiceOptions options);

}  // namespace sluice
