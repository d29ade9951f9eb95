// One push over a link to a decode node: the headers of its chunks and their checksums go by
// KvIngest.WriteByLink, and their bytes by the link, straight from the caller's memory. The link's
// device computes the checksums. One thread.
#pragma once

#include <grpcpp/client_context.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "sluice/v1/ingest.grpc.pb.h"
#include "src/device/peer_link.h"
#include "src/service/links/link_peers.h"

namespace sluice {

class LinkPush {
 public:
  struct Options {
    std::string address;  // of the decode node
    std::string transfer_id;
    // They outlive the push.
    LinkPeers* links = nullptr;
    v1::KvIngest::Stub* stub = nullptr;
    // Makes the context of the stream. It must not pass a caller's cancellation on, which would
    // break the link off.
    std::function<std::unique_ptr<grpc::ClientContext>()> new_context;
  };
  // Waits for the link and for this push's turn on it. An error says why nothing goes over a link
  // now; nothing has been sent then.
  static absl::StatusOr<std::unique_ptr<LinkPush>> Open(const Options& options);
  // Ends the link unless Finish has been called.
  ~LinkPush();

  // A chunk, and where its payload lies in the pieces.
  struct Chunk {
    v1::ChunkHeader header;
    uint64_t offset = 0;
    uint64_t bytes = 0;  // at most message_bytes()
  };
  size_t message_bytes() const { return peer_->message_bytes; }
  // Sends the chunks, as many to a message as fit, since a message takes a link some time to begin.
  // The last ones are still on their way, or wait for others, when it returns. The pieces lie in
  // memory that the link's device reaches, and stay as they are until Finish or the destructor has
  // returned. After an error this push sends no more: UNAVAILABLE: the link or the stream has
  // failed; else the decode node's own error, as of Write, about any chunk so far.
  absl::Status Send(const std::vector<Chunk>& chunks,
                    absl::Span<const absl::Span<const uint8_t>> pieces);
  // Waits until everything has landed, ends the push, and leaves the link to the next one. Returns
  // the errors of Send.
  absl::Status Finish();
  // Returns the bytes of the messages that have landed, as the decode node last said.
  uint64_t bytes_landed() const { return bytes_landed_; }

 private:
  class Stream;
  LinkPush(const Options& options, std::shared_ptr<LinkPeer> peer, std::unique_ptr<Stream> stream);
  // Puts a chunk into the next message, which is sent when it is full.
  absl::Status Add(const Chunk& chunk, absl::Span<const absl::Span<const uint8_t>> pieces);
  absl::Status SendMessage();
  // Waits until the oldest message has been received, and sends its checksum.
  absl::Status SendChecksum();
  // Waits for all messages and for what the decode node says of them.
  absl::Status Settle();
  // Takes down what the decode node has said so far.
  v1::WriteByLinkResponse Heard();
  // Ends the link and the stream, and returns why.
  absl::Status Broken(const absl::Status& why);

  LinkPeers* const links_;
  std::shared_ptr<LinkPeer> peer_;  // this push's turn lasts until it is null
  std::unique_ptr<Stream> stream_;
  struct Message {
    v1::LinkMessage chunks;
    std::vector<PeerLink::Piece> pieces;
    uint64_t bytes = 0;
  };
  Message next_;                     // waits for more chunks
  uint64_t sent_ = 0, checked_ = 0;  // messages whose bytes, or whose checksums, were sent
  std::deque<uint64_t> coming_;      // sizes of those that are not known to have landed
  uint64_t landed_ = 0, bytes_landed_ = 0;
};

}  // namespace sluice
