// A prefill node's side of handoffs: a real Prefill service, whose prefiller gives known bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "sluice/v1/prefill.grpc.pb.h"
#include "src/base/readiness.h"
#include "src/metrics/metrics.h"
#include "src/service/grpc/channels.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/ingest/kv_pusher.h"
#include "src/service/links/link_peers.h"
#include "src/service/prefill/prefill_service.h"

namespace sluice::testing {

// Gives DecodeSide::LayerBytes() in payloads of 64 tokens, in pieces that begin and end anywhere.
class FakePrefiller : public Prefiller {
 public:
  absl::StatusOr<PrefillResult> Run(const std::vector<int32_t>& prompt, const SamplingParams&,
                                    bool want_first_token, LayerSink& sink,
                                    const std::function<bool()>& cancelled) override;
  std::atomic<int> runs = 0;
  std::function<void(int layer)> before_layer;
  absl::Status result;

 private:
  struct Part;
  static absl::Status GiveAll(const std::deque<Part>& parts, LayerSink& sink);
};

struct PrefillSide {
  explicit PrefillSide(int threads = 2, size_t max_queued = 8,
                       uint64_t max_kept_bytes = kMaxKeptBytes, bool links = false);

  absl::Status Run(const v1::RunRequest& request, v1::RunResponse* response);

  FakePrefiller prefiller;
  Readiness readiness;
  Channels channels;
  Metrics metrics;
  PromptCounts counts{&metrics};
  std::optional<LinkPeers> peers;
  std::unique_ptr<GrpcServer> server;
  std::unique_ptr<v1::Prefill::Stub> stub;
};

// Returns a request to push a prompt of `tokens` tokens to a decode node.
v1::RunRequest PromptOf(int tokens, const std::string& decode_address);

}  // namespace sluice::testing
