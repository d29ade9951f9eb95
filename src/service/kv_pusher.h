// Pushes a prompt's caches into a decode node over one KvIngest.Write stream, while they are
// computed: Layer() cuts and queues, a thread of its own sends. One transfer, one attempt.
#pragma once

#include <grpcpp/client_context.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "sluice/v1/ingest.grpc.pb.h"
#include "src/kv/transfer_table.h"
#include "src/prefill/prefiller.h"

namespace sluice {

class KvPusher {
 public:
  struct Options {
    std::string transfer_id;
    uint64_t max_chunk_bytes = 0;
    // Send only chunks that overlap one of these; `filter` false: everything.
    bool filter = false;
    std::vector<MissingRange> missing;
  };
  // Opens the stream on `context`, which carries the deadline.
  KvPusher(v1::KvIngest::Stub* stub, std::unique_ptr<grpc::ClientContext> context, Options options);
  // Cancels the stream if it is still open.
  ~KvPusher();

  // LayerSink::Layer's contract. Blocks while kMaxQueuedBytes wait to be sent. Fails once the
  // stream is broken.
  absl::Status Layer(int layer, const CacheKind& kind, int token_begin, int token_end,
                     absl::Span<const absl::Span<const uint8_t>> pieces);

  // Sends what is queued, closes, and returns what the decode node says.
  absl::Status Finish();
  // Gives up. What broke the stream, or OK if nothing had.
  absl::Status Abandon();

  uint64_t bytes_sent() const { return bytes_sent_; }    // after Finish or Abandon
  absl::Time first_sent() const { return first_sent_; }  // InfiniteFuture: nothing was

 private:
  // Memory of one running prompt; deep enough to cover the time of a slow write.
  static constexpr uint64_t kMaxQueuedBytes = 64 << 20;

  absl::Status Enqueue(v1::WriteRequest chunk);
  void SendLoop();
  bool CanEnqueue() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return broken_ || queued_bytes_ < kMaxQueuedBytes;
  }
  bool CanSend() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !queue_.empty() || closed_; }

  const Options options_;
  const std::unique_ptr<grpc::ClientContext> context_;
  v1::WriteResponse response_;
  std::unique_ptr<grpc::ClientWriter<v1::WriteRequest>> writer_;

  absl::Mutex mutex_;
  std::deque<v1::WriteRequest> queue_ ABSL_GUARDED_BY(mutex_);
  uint64_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;

  // Written by the sending thread, read after it was joined.
  absl::Status status_;
  uint64_t bytes_sent_ = 0;
  absl::Time first_sent_ = absl::InfiniteFuture();
  std::thread thread_;
};

}  // namespace sluice
