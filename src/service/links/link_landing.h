// Lands the messages of a link in a transfer, each a chunk: the same claims, checksums and leases
// as those of a stream. Several are under way, and land in their order. A chunk's checksum is in
// its header (Await), or comes when its bytes have been sent (Arrive, Land). One thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
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
  // Claims the chunk's blocks and asks for its message. The message's bytes are dropped if they
  // cannot be claimed, so that the link stays in order. An error means that the link has failed, or
  // that no such message can come over it (INVALID_ARGUMENT). REQUIRES: not full().
  absl::Status Ask(const v1::LinkChunk& chunk);
  // Asks for the chunk's message and drops its bytes.
  absl::Status Drop(const v1::LinkChunk& chunk);

  struct Landed {
    // The number of its blocks that are new, or the errors of ChunkLanding::Begin and Finish.
    absl::StatusOr<uint64_t> blocks = uint64_t{0};
    uint64_t bytes = 0;  // 0 if they were dropped
  };
  // Waits for the oldest message, whose header had the checksum, and lands it. An error means that
  // the link has failed. REQUIRES: moving().
  absl::StatusOr<Landed> Await();
  // Waits for the oldest message, whose checksum comes later. The error is that of Await. REQUIRES:
  // moving().
  absl::Status Arrive();
  // Lands the oldest message that has arrived. REQUIRES: arrived().
  Landed Land(uint32_t crc32c);

 private:
  struct Coming {
    std::unique_ptr<ChunkLanding> chunk;  // null: its bytes are dropped
    absl::Status refused;                 // why
    uint64_t bytes = 0;
  };
  absl::Status Drop(const v1::LinkChunk& chunk, const absl::Status& why);
  static Landed Finish(const Coming& message);

  PeerLink* const link_;
  TransferTable* const transfers_;
  const std::string transfer_id_;
  std::deque<Coming> coming_, arrived_;
};

}  // namespace sluice
