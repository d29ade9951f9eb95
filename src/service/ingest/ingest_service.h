// KvIngest: prefill nodes push caches. Reactors on gRPC's threads; every call goes straight into
// the thread-safe TransferTable, the payload of a Write in one copy.
#pragma once

#include <cstdint>

#include "src/base/readiness.h"
#include "src/kv/transfer_table.h"
#include "src/service/wire/grpc_service.h"

namespace sluice {

class Access;
class Metrics;

struct IngestServiceOptions {
  uint32_t vocab_size = 0;
  // Everything outlives the service.
  TransferTable* transfers = nullptr;
  const Readiness* readiness = nullptr;
  Metrics* metrics = nullptr;
  const Access* access = nullptr;  // null: without TLS
  // Writes the token ids of prompts into the log.
  bool log_prompts = false;
};

GrpcService NewIngestService(const IngestServiceOptions& options);

// A message around the largest chunk: its header (at most kMaxChunkHeaderBytes), tags, lengths, and
// fields that a later version may add.
constexpr uint64_t MaxChunkMessageBytes(uint64_t max_chunk_bytes) {
  return max_chunk_bytes + (64 << 10);
}

}  // namespace sluice
