// One Read of a KvSource. Its chunks land in a transfer of this node.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "sluice/v1/source.pb.h"
#include "src/service/wire/read_ahead.h"

namespace sluice {

class TransferTable;

class PullStream : private ReadAhead,
                   private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  struct Options {
    std::shared_ptr<grpc::Channel> channel;
    std::unique_ptr<grpc::ClientContext> context;
    v1::ReadRequest request;
    std::string transfer_id;             // chunks land here, whatever their headers say
    TransferTable* transfers = nullptr;  // outlives the stream
    absl::Duration idle_timeout;         // see EndIfIdle
  };
  // Begins to read.
  explicit PullStream(Options options);
  ~PullStream() override { Join().IgnoreError(); }

  // Waits for the end of the stream. Returns the call's own error, DEADLINE_EXCEEDED
  // (SOURCE_SILENT), FAILED_PRECONDITION (SOURCE_MISMATCH) for a chunk that does not fit, or the
  // reason why a chunk could not land.
  absl::Status Join();
  // Must be called every now and then from another thread. Ends the stream if nothing came for
  // idle_timeout, or if `unwanted`.
  void EndIfIdle(absl::Time now, bool unwanted);

 private:
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  void Read(grpc::ByteBuffer* message) override { StartRead(message); }
  absl::Status Take(grpc::ByteBuffer* message) override;
  void Ended(const absl::Status& status) override;

  const Options options_;
  grpc::GenericStub stub_;
  grpc::ByteBuffer request_;
  std::atomic<int64_t> heard_;  // when the last chunk came, in ms since 1970
  std::atomic<bool> silent_ = false;
  absl::Status landed_;  // why a chunk could not land
  absl::Status status_;  // the call's; read once done_, as landed_ is
  absl::Notification done_;
};

}  // namespace sluice
