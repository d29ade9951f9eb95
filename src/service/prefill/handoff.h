// Hands one prompt over to a decode node: Reserve, then compute and push at once, then Commit;
// Abort if anything fails. Blocking; one thread per object.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/server_context.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "sluice/v1/ingest.grpc.pb.h"
#include "sluice/v1/prefill.pb.h"
#include "src/kv/transfer_table.h"
#include "src/prefill/prefiller.h"

namespace sluice {

class LinkPeers;
class Metrics;

class Handoff {
 public:
  struct Options {
    Prefiller* prefiller = nullptr;
    std::shared_ptr<grpc::Channel> channel;
    std::string decode_address;  // for messages
    // Makes channels to ports of the decode node's ranks; null: all goes to `channel`.
    std::function<std::shared_ptr<grpc::Channel>(const std::string& address)> channel_to;
    v1::ReserveRequest reserve;
    std::vector<int32_t> prompt;
    SamplingParams sampling;
    bool want_first_token = true;
    absl::Duration call_timeout;
    absl::Duration push_timeout;
    uint64_t max_kept_bytes = 0;  // see KvPusher
    // These outlive the handoff.
    LinkPeers* links = nullptr;  // to decode nodes; null: all goes over gRPC
    const Metrics* metrics = nullptr;
    // The call that this is done for. Its deadline and its cancellation pass on to every call made
    // here.
    const grpc::CallbackServerContext* parent = nullptr;
    std::function<bool()> cancelled;
  };
  explicit Handoff(Options options);

  // Fills the answer but for queued and total of the timings, which the caller adds to. An error of
  // the decode node keeps its code and details, and gets "decode node ADDRESS" before its message.
  absl::Status Run(v1::RunResponse* response);

 private:
  class Sink;
  absl::Status Reserve();
  // Makes one attempt to compute, push and commit. With `missing`, only those ranges are sent.
  absl::Status Attempt(const std::vector<MissingRange>* missing, v1::RunResponse* response);
  absl::Status Commit(const v1::RunResponse& response, const SelectionHints& hints);
  void Abort(const absl::Status& why);

  std::unique_ptr<grpc::ClientContext> NewContext(absl::Duration timeout) const;
  // Returns a context that the caller's cancellation does not reach.
  std::unique_ptr<grpc::ClientContext> LinkContext() const;
  absl::Status FromDecodeNode(const absl::Status& status) const;

  const Options options_;
  const std::unique_ptr<v1::KvIngest::Stub> stub_;
  std::string transfer_id_;
  uint64_t max_chunk_bytes_ = 0;
  int64_t cached_tokens_ = 0;  // leading tokens that the decode node has
  int64_t hint_tokens_ = 0;    // that the decode node takes
  bool wants_queries_ = false;
  google::protobuf::RepeatedPtrField<v1::RankPort> rank_ports_;
  absl::Time first_sent_ = absl::InfiniteFuture();
  uint64_t grpc_bytes_ = 0, link_bytes_ = 0;
  bool link_tried_ = false;
  bool retryable_ = false;  // sending again may mend the failure of the last attempt
};

}  // namespace sluice
