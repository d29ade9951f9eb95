// Lands the messages of a link in a transfer, each of one chunk or more: the same claims, checksums
// and leases as those of a stream. Several are under way, and land in their order. The checksum of
// a message of one chunk is in the chunk's header (Await); or a message's comes when its bytes have
// been sent (Arrive, Land). One thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "sluice/v1/ingest.pb.h"
#include "src/device/peer_link.h"
#include "src/kv/chunk_landing.h"

namespace sluice {

class TransferTable;

class LinkLanding {
 public:
  // All of these outlive the landing.
  LinkLanding(PeerLink* link, TransferTable* transfers, std::string transfer_id);
  // Fails the link if messages are under way, so that nothing more is written to their pages.
  ~LinkLanding();
  LinkLanding(const LinkLanding&) = delete;
  LinkLanding& operator=(const LinkLanding&) = delete;

  // Returns whether a message is asked for and has not been awaited.
  bool moving() const { return !coming_.empty(); }
  // Returns whether a message has arrived and lacks its checksum.
  bool arrived() const { return !arrived_.empty(); }
  bool full() const {
    return coming_.size() + arrived_.size() == static_cast<size_t>(link_->depth());
  }
  // The chunks of a message, whose bytes come one behind the other.
  using Chunks = absl::Span<const v1::LinkChunk* const>;
  // Claims the chunks' blocks and asks for the message. Bytes of chunks that cannot be claimed are
  // dropped, so that the link stays in order. An error means that the link has failed, or that no
  // such message can come over it (INVALID_ARGUMENT). REQUIRES: not full().
  absl::Status Ask(Chunks chunks);
  // Asks for the message and drops all of its bytes.
  absl::Status Drop(Chunks chunks);

  // Landed tells what became of a chunk.
  struct Landed {
    // The number of its blocks that are new, or the errors of ChunkLanding::Begin and Finish.
    absl::StatusOr<uint64_t> blocks = uint64_t{0};
    uint64_t bytes = 0;  // 0 if they were dropped
  };
  // Waits for the oldest message, whose chunks' headers had the checksum, and lands it. An error
  // means that the link has failed. REQUIRES: moving().
  absl::StatusOr<std::vector<Landed>> Await();
  // Waits for the oldest message, whose checksum comes later. The error is that of Await. REQUIRES:
  // moving().
  absl::Status Arrive();
  // Lands the oldest message that has arrived. REQUIRES: arrived().
  std::vector<Landed> Land(uint32_t crc32c);

 private:
  struct Part {
    std::unique_ptr<ChunkLanding> chunk;  // null: its bytes are dropped
    absl::Status refused;                 // why
    uint64_t bytes = 0;
  };
  using Message = std::vector<Part>;
  // Claims a chunk's blocks.
  Part Begin(const v1::LinkChunk& chunk);
  absl::Status Receive(Chunks chunks, Message message);
  // Takes out the oldest message that has arrived.
  Message TakeArrived();
  static std::vector<Landed> Finish(const Message& message);

  PeerLink* const link_;
  TransferTable* const transfers_;
  const std::string transfer_id_;
  std::deque<Message> coming_, arrived_;
};

}  // namespace sluice
