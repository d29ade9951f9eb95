// Pushes a prompt's caches into a decode node while they are computed. Where both nodes have links,
// LayerOnDevice() sends over one (link_push.h) until that fails. Otherwise, and from then on,
// Layer() cuts and queues chunks, and a thread of the pusher sends them over KvIngest.Write. A
// stream that breaks is opened again and goes on with the chunks that have not landed.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "sluice/v1/ingest.grpc.pb.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"
#include "src/prefill/prefiller.h"
#include "src/service/ingest/link_push.h"
#include "src/service/wire/chunking.h"

namespace sluice {

// Returns whether sending again may mend the error that ended a call. It may for a broken stream,
// whatever the transport calls it (a server that stops cancels), and for blocks that a checksum
// refused.
bool MayMend(const absl::Status& status);

// The decode node's report about a transfer.
struct TransferProgress {
  bool committed = false;
  bool everything = false;            // `missing` may be incomplete: take all to be missing
  std::vector<MissingRange> missing;  // ranges that have not landed
};
absl::StatusOr<TransferProgress> GetProgress(v1::KvIngest::Stub* stub, grpc::ClientContext* context,
                                             const std::string& transfer_id);

// The newest of the sent chunks are kept, in case they do not land. The limit is more than what can
// be under way, so that a resumed stream lacks nothing: the window of a stream (16 MiB at most),
// two chunks at the node, and the sockets' buffers.
inline constexpr uint64_t kMaxKeptBytes = 48 << 20;

class KvPusher {
 public:
  struct Options {
    std::string transfer_id;
    uint64_t max_chunk_bytes = 0;
    // Leading tokens that the decode node has and that are not sent; the end of a block.
    int64_t cached_tokens = 0;
    // If set, only chunks that overlap one of `missing` are sent.
    bool filter = false;
    std::vector<MissingRange> missing;
    // They make the contexts of a stream and of other calls, with their deadlines.
    std::function<std::unique_ptr<grpc::ClientContext>()> stream_context, call_context;
    uint64_t max_kept_bytes = kMaxKeptBytes;
    // The port of a rank that takes the chunks (ReserveResponse.rank_ports), and its channel; null:
    // there is none. When the first stream to it breaks, or it cannot be reached, what is missing
    // goes to `stub`'s node. The rank's stub outlives the pusher.
    v1::KvIngest::Stub* rank_stub = nullptr;
    std::shared_ptr<grpc::Channel> rank_channel;
    std::string rank_address;
    // Links to decode nodes, which outlive the pusher; null: all goes over gRPC. The others are
    // those of LinkPush::Options.
    LinkPeers* links = nullptr;
    std::string address;
    std::function<std::unique_ptr<grpc::ClientContext>()> link_context;
  };
  KvPusher(v1::KvIngest::Stub* stub, Options options);
  // Cancels the stream if it is still open.
  ~KvPusher();

  // These three are as LayerSink says. The first call opens the link.
  bool OnDevice();
  absl::StatusOr<bool> LayerOnDevice(int layer, const CacheKind& kind, int token_begin,
                                     int token_end,
                                     absl::Span<const absl::Span<const uint8_t>> pieces);
  absl::StatusOr<bool> FlushDevice();
  // Takes these heads of a layer, as LayerSink::Layer says. Blocks while kMaxQueuedBytes wait to be
  // sent. Fails once nothing more can be sent. After a link has broken, sends only what had not
  // landed then.
  absl::Status Layer(int layer, const CacheKind& kind, int token_begin, int token_end,
                     absl::Span<const absl::Span<const uint8_t>> pieces, HeadRange heads);

  // Sends what is queued, closes the stream, and returns the decode node's status. FlushDevice
  // comes before it.
  absl::Status Finish();
  // Gives up. Returns the error that broke the stream, or OK if nothing had.
  absl::Status Abandon();

  // These are valid after Finish or Abandon.
  uint64_t bytes_sent() const { return bytes_sent_; }  // over gRPC
  uint64_t bytes_by_link() const { return bytes_by_link_; }
  std::optional<LinkUse> link_use() const { return link_use_; }  // empty: no link was tried
  absl::Time first_sent() const { return first_sent_; }  // InfiniteFuture if nothing was sent

 private:
  // Memory for one running prompt and address that it goes to, enough to cover the time of a slow
  // write.
  static constexpr uint64_t kMaxQueuedBytes = 32 << 20;
  static constexpr int kMaxResumes = 5;
  static constexpr absl::Duration kConnectTime = absl::Seconds(2);

  using Pieces = absl::Span<const absl::Span<const uint8_t>>;
  struct Chunk {
    v1::ChunkHeader header;  // without its checksum
    ChunkPlan plan;
  };
  // Returns the chunks of these heads of a layer that are to be sent, of at most `most` bytes.
  absl::StatusOr<std::vector<Chunk>> ChunksOf(int layer, const CacheKind& kind, int token_begin,
                                              int token_end, uint64_t most, HeadRange heads) const;
  void OpenLink();
  // Gives the link up. Returns OK if gRPC may carry the rest; else the error is the transfer's own.
  absl::Status LinkEnded(const absl::Status& why);
  // Finds out what had not landed when the link broke.
  void FindMissing();
  absl::Status Enqueue(v1::WriteRequest chunk);
  void SendLoop();
  // Runs one stream to its end. Returns OK if everything was sent and the node has answered.
  absl::Status SendStream();
  // Returns whether the rank's port can be reached, soon.
  bool ReachesRank() const;
  // Pauses, asks what has landed, and queues the kept chunks that have not landed again.
  absl::Status PrepareResume(int resume);
  void Keep(v1::WriteRequest chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool CanEnqueue() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return broken_ || queued_bytes_ < kMaxQueuedBytes;
  }
  bool CanSend() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !queue_.empty() || closed_; }

  v1::KvIngest::Stub* const stub_;
  const Options options_;

  absl::Mutex mutex_;
  std::deque<v1::WriteRequest> queue_ ABSL_GUARDED_BY(mutex_);
  uint64_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<v1::WriteRequest> kept_ ABSL_GUARDED_BY(mutex_);
  uint64_t kept_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;  // the stream under way
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool abandoned_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;

  bool to_rank_ = false;  // the sending thread's
  // The sending thread writes these; they are read after it was joined. Without one, the thread
  // that calls Layer writes them.
  absl::Status status_;
  uint64_t bytes_sent_ = 0;
  absl::Time first_sent_ = absl::InfiniteFuture();
  std::thread thread_;  // begins with the first chunk for gRPC

  // Used by the thread that calls Layer.
  bool filter_;
  std::vector<MissingRange> missing_;
  std::unique_ptr<LinkPush> link_;
  std::optional<LinkUse> link_use_;
  bool asked_ = false;  // FindMissing was called
  uint64_t bytes_by_link_ = 0;
};

}  // namespace sluice
