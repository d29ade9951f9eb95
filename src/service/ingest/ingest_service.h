// KvIngest: prefill nodes push caches. The reactors run on gRPC's threads, and every call goes
// straight into the thread-safe TransferTable. The payload of a Write is copied once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "src/base/readiness.h"
#include "src/kv/transfer_table.h"
#include "src/service/wire/grpc_service.h"

namespace sluice {

class Access;
class ChunkClaims;
class LinkServer;
class Metrics;

struct IngestServiceOptions {
  uint32_t vocab_size = 0;
  // All of these outlive the service.
  TransferTable* transfers = nullptr;
  const Readiness* readiness = nullptr;
  Metrics* metrics = nullptr;
  const Access* access = nullptr;  // null without TLS
  // Links to prefill nodes; null: all comes over gRPC (kv_transport grpc).
  LinkServer* links = nullptr;
  size_t link_message_bytes = size_t{8} << 20;
  // Whether the token ids of prompts are written into the log.
  bool log_prompts = false;
  // Serves chunks that come to other ranks' ports; outlives the service. Null: they have none.
  ChunkClaims* claims = nullptr;
  // By rank: where it takes chunks of its own heads; empty: nowhere.
  std::vector<std::string> rank_addresses;
};

GrpcService NewIngestService(const IngestServiceOptions& options);

// Returns the maximum bytes of a message with the largest chunk: the payload, its header (at most
// kMaxChunkHeaderBytes), tags, lengths, and fields that a later version may add.
constexpr uint64_t MaxChunkMessageBytes(uint64_t max_chunk_bytes) {
  return max_chunk_bytes + (64 << 10);
}

}  // namespace sluice
