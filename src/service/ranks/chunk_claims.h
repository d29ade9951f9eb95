// RankService.Claim from both ends: another rank asks for the pages of a chunk that comes to its
// own port, and says when the payload is there. Rank 0 keeps the transfers, as for chunks that come
// to its own port.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/sync_stream.h>

#include <functional>
#include <memory>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "sluice/v1/ranks.grpc.pb.h"

namespace sluice {

// ClaimStream is rank 0's side of one stream of chunks. One thread at a time. What is claimed when
// it is destroyed stays missing.
class ClaimStream {
 public:
  virtual ~ClaimStream() = default;
  // Carries a step out. The errors are those of KvIngest.Write, and end the stream.
  virtual absl::Status Take(const v1::ClaimRequest& request, v1::ClaimAnswer* answer) = 0;
  // Returns whether the rank may write to pages now.
  virtual bool claimed() const = 0;
};

// Rank 0's end. Thread-safe.
class ChunkClaims {
 public:
  using Open = std::function<std::unique_ptr<ClaimStream>(int rank)>;
  using Stream = grpc::ServerReaderWriter<v1::ClaimAnswer, v1::ClaimRequest>;

  // `lost` is told of a rank whose stream broke while it might write, and returns why the node has
  // failed.
  ChunkClaims(int size, std::function<absl::Status(int rank)> lost);

  // From now on `open` makes what serves a rank's stream. Null: streams are refused, those that are
  // open have ended, and nothing that `open` made is there any more.
  void ServeWith(Open open);
  absl::Status Serve(grpc::ServerContext* context, Stream* stream);

 private:
  absl::Status Converse(Open open, Stream* stream);

  const int size_;
  const std::function<absl::Status(int rank)> lost_;
  absl::Mutex mutex_;
  Open open_ ABSL_GUARDED_BY(mutex_);
  std::set<grpc::ServerContext*> serving_ ABSL_GUARDED_BY(mutex_);
};

// The other rank's end: one stream of chunks. One thread at a time; Cancel may come from any.
class ClaimCall {
 public:
  // `arrived` is called before rank 0 hears that bytes are there: what it does is seen by the
  // thread that will read them. It returns whether the node has not failed. `failure` says why it
  // has.
  ClaimCall(int rank, const std::shared_ptr<grpc::Channel>& channel, std::function<bool()> arrived,
            std::function<absl::Status()> failure, std::function<void(ClaimCall*)> gone);
  // Leaves what is claimed missing.
  ~ClaimCall();

  // The errors are those of KvIngest.Write. After one only Broke() is called.
  absl::StatusOr<v1::ClaimAnswer> Begin(v1::ClaimRequest::Begin begin);
  absl::StatusOr<v1::ClaimAnswer> End(uint32_t crc32c, bool differs);
  // The sender's stream has ended so.
  void Broke(const absl::Status& why);
  // Ends the call, and with it a wait for rank 0.
  void Cancel() { context_.TryCancel(); }

 private:
  absl::StatusOr<v1::ClaimAnswer> Ask(v1::ClaimRequest request);

  const int rank_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::function<bool()> arrived_;
  const std::function<absl::Status()> failure_;
  const std::function<void(ClaimCall*)> gone_;
  grpc::ClientContext context_;
  // Null before the first claim: opening waits for a connection, which Cancel ends.
  std::unique_ptr<grpc::ClientReaderWriter<v1::ClaimRequest, v1::ClaimAnswer>> stream_;
  bool ended_ = false;  // Finish was called
};

}  // namespace sluice
