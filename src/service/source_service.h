// KvSource: gives decode nodes what HeldPrompts holds. Chunks go out as slices of the held memory,
// each written when the reader has room for it.
#pragma once

#include <cstdint>
#include <string>

#include "src/kv/cache_layout.h"
#include "src/prefill/held_prompts.h"
#include "src/service/grpc_service.h"

namespace sluice {

class Access;

struct SourceServiceOptions {
  std::string model_fingerprint;
  CacheLayout layout;
  // Of a chunk, where the reader names no smaller measure.
  uint64_t max_chunk_bytes = uint64_t{4} << 20;
  // Outlives the service.
  HeldPrompts* held = nullptr;
  // Null: without TLS.
  const Access* access = nullptr;
};

GrpcService NewSourceService(SourceServiceOptions options);

}  // namespace sluice
