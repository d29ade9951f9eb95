// A decode node's side of handoffs: a real ingest service over a real transfer table.
#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "sluice/v1/ingest.grpc.pb.h"
#include "src/base/readiness.h"
#include "src/kv/page_pool.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/ingest/ingest_service.h"
#include "src/service/links/link_server.h"

namespace sluice::testing {

struct DecodeSide {
  static constexpr int kLayers = 3;
  static constexpr uint32_t kVocab = 100;
  static constexpr uint32_t kMaxContext = 256;
  static constexpr uint64_t kMaxChunk = 8192;
  static constexpr absl::Duration kLinkDeadline = absl::Seconds(1);
  static CacheKind Kind();
  // Returns a layer's payload of a token range, whose bytes show where they belong.
  static std::string LayerBytes(int layer, int token_begin, int token_end);

  explicit DecodeSide(bool links = false);

  // Returns the options of an ingest service without links.
  IngestServiceOptions ServiceOptions();
  // Returns options of a server that listens on `address`.
  static GrpcServer::Options ServerOptions(const std::string& address);

  absl::StatusOr<std::string> Reserve(int context_length);
  // Returns one layer's chunk of tokens [0, 32), both heads.
  static v1::WriteRequest Chunk(const std::string& id, int layer);
  absl::Status Write(const std::vector<v1::WriteRequest>& chunks,
                     v1::WriteResponse* response = nullptr);
  grpc::Status Commit(const std::string& id);
  // Takes the committed transfer, through the engine's side of the table.
  ReadySequence Take(const std::string& id);
  // Checks that every byte of the caches lies where the host cache's layout says, if they came in
  // payloads of 64 tokens.
  static void CheckHome(const SequenceCache& home, int tokens);

  Metrics metrics;
  Readiness readiness;
  std::unique_ptr<PagePool> hbm, dram;
  std::unique_ptr<TransferTable> table;
  std::optional<LinkServer> link_server;
  std::unique_ptr<GrpcServer> server;
  std::unique_ptr<v1::KvIngest::Stub> stub;
};

}  // namespace sluice::testing
