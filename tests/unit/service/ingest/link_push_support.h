// A decode node that takes pushes over links of the CPU device, and what pushes to it.
#pragma once

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
#include "src/device/cpu/cpu_peer_link.h"
#include "src/kv/page_pool.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/ingest/link_push.h"
#include "src/service/links/link_peers.h"
#include "src/service/links/link_server.h"

namespace sluice::testing {

struct PushPair {
  static constexpr int kLayers = 11;             // more than are under way
  static constexpr uint64_t kChunkBytes = 4096;  // of one layer: 2 heads x 32 tokens x 64 bytes
  static constexpr absl::Duration kDeadline = absl::Seconds(1);

  // Without `linked` the node has no links. A message has `message` bytes at most.
  explicit PushPair(bool linked = true, std::shared_ptr<PeerLinks> senders = NewCpuPeerLinks(),
                    size_t message = kChunkBytes,
                    std::shared_ptr<PeerLinks> receivers = NewCpuPeerLinks());

  // Reserves a transfer of 32 tokens, and returns its id.
  std::string Reserve();
  absl::StatusOr<std::unique_ptr<LinkPush>> Open(const std::string& transfer_id);
  // Returns a layer's chunk of all 32 tokens.
  static LinkPush::Chunk Chunk(int layer);
  // Sends a layer, and hears nothing of it yet.
  absl::Status Send(LinkPush& push, int layer);
  // Sends a layer, and waits for what the node says.
  absl::Status Land(LinkPush& push, int layer);
  // Pushes a whole transfer, and compares every byte of it.
  void PushWell();
  // Returns the id of the link that the next push would use; empty if there is none.
  std::string Link();

  Metrics metrics;
  Readiness readiness;
  std::unique_ptr<PagePool> hbm, dram;
  std::unique_ptr<TransferTable> table;
  std::optional<LinkServer> link_server;
  std::unique_ptr<GrpcServer> server;
  std::optional<LinkPeers> peers;
  std::unique_ptr<v1::KvIngest::Stub> stub;
  // A layer's payload begins at byte `layer` of these.
  std::vector<uint8_t> bytes = std::vector<uint8_t>(kChunkBytes + kLayers);
};

}  // namespace sluice::testing
