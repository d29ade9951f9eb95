// One chunk on its way into the pages of its transfer: checked against the transfer, claimed block
// by block, copied, and counted only if its checksum holds.
// Blocks that the transfer shares with other sequences are there from its beginning. Bytes for them
// are read and dropped, and their checksum does not matter.
//
// Bytes for ranks on other hosts go on their way at once (far_heads.h). Finish and the destructor
// wait for them to arrive.
//
// Locking: Begin, Finish and the destructor take the store's lock for a moment. Append takes none:
// the blocks that a landing has claimed are its own until it is gone, and a transfer's pages are
// not given back, nor handed to the engine, while a landing of it lives. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/kv/far_heads.h"
#include "src/kv/head_places.h"

namespace sluice {

class Transfer;
class TransferStore;

// The part of a transfer that a chunk holds. Ranges are half open.
struct ChunkHeader {
  std::string transfer_id;
  uint32_t layer = 0;
  std::string kind;
  uint32_t head_begin = 0, head_end = 0;
  uint32_t token_begin = 0, token_end = 0;
  uint32_t crc32c = 0;  // checksum of the payload
};

class ChunkLanding {
 public:
  // Checks the header and claims those of its blocks that have not landed. The landing then expects
  // `payload_bytes` bytes. Errors:
  //   NOT_FOUND            there is no such transfer (TRANSFER_NOT_FOUND)
  //   INVALID_ARGUMENT     the header does not fit the transfer, or the payload does not fit it
  //   FAILED_PRECONDITION  the transfer is committed (COMMITTED) or poisoned (POISONED)
  //   ABORTED              another landing writes one of the blocks (BLOCK_BUSY)
  static absl::StatusOr<std::unique_ptr<ChunkLanding>> Begin(TransferStore* store,
                                                             const ChunkHeader& header,
                                                             uint64_t payload_bytes,
                                                             uint64_t max_chunk_bytes);
  // Leaves the claimed blocks missing if Finish has not succeeded.
  ~ChunkLanding();
  ChunkLanding(const ChunkLanding&) = delete;
  ChunkLanding& operator=(const ChunkLanding&) = delete;

  // Returns the number of bytes that are still to come.
  uint64_t left() const { return left_; }
  // Copies the next bytes into their pages. REQUIRES: bytes.size() <= left().
  void Append(absl::Span<const uint8_t> bytes);
  // The payload may also come by other means than Append. Targets() says where its bytes go, in
  // order. Whoever writes them there, also a device, has ended when it calls Received() with the
  // checksum of all of them, and before this landing goes. What several ranks have goes to the
  // first of them; Received() copies it to the others. REQUIRES: this process sees the memory of
  // every rank.
  struct Target {
    uint8_t* data;  // null: nowhere, because the block is there
    uint64_t bytes;
  };
  std::vector<Target> Targets() const;
  // Where a rank on another host puts the payload, which comes to it and not here: stretches of the
  // kind's pages in its pool, in order. The rank tells Received() also whether bytes that it
  // compared differ. INVALID_ARGUMENT: the chunk has heads that are not that rank's alone.
  enum class Use { kWrite, kCompare, kIgnore };
  struct RankTarget {
    uint64_t offset;
    uint64_t bytes;
    Use use;
  };
  absl::StatusOr<std::vector<RankTarget>> TargetsOn(int rank) const;
  size_t kind() const { return kind_; }
  // Sets the checksum that the header lacked. Comes before Finish.
  void Expect(uint32_t crc32c) { header_.crc32c = crc32c; }
  void Received(uint32_t crc32c, bool differs = false);
  // Checks the checksum and counts the blocks as landed. Returns how many blocks are new: 0 if the
  // chunk repeats what is there. Errors:
  //   INVALID_ARGUMENT     bytes are missing
  //   DATA_LOSS            the checksum does not hold; the blocks stay missing (CHECKSUM_MISMATCH)
  //   NOT_FOUND            the transfer has ended meanwhile (TRANSFER_NOT_FOUND)
  //   UNAVAILABLE          a rank that has some of the heads is lost (RANK_LOST)
  //   FAILED_PRECONDITION  the blocks landed before with other bytes: the transfer is poisoned
  // Call it at most once after all bytes are there. Bytes that went nowhere are not compared.
  absl::StatusOr<uint64_t> Finish();

 private:
  // A stretch of page memory that the payload fills in order.
  struct Piece {
    uint8_t* target;
    uint64_t bytes;
    // The block landed before, and its bytes are compared; or other sequences share it, and they
    // are ignored: another node's kernels may make others of the same tokens.
    Use use;
    // Says where each rank has the head, where ranks divide the model; else null.
    const HeadPlaces::Place* place = nullptr;
  };
  // Compares or writes bytes of the payload that begin `offset` bytes into a piece.
  void PutOrCompare(const Piece& piece, uint64_t offset, absl::Span<const uint8_t> bytes);
  ChunkLanding(TransferStore* store, const ChunkHeader& header, uint64_t payload_bytes)
      : store_(store), header_(header), left_(payload_bytes) {}
  // Fills pieces_ from header_ and claimed_.
  void FindPieces();
  // Copies what has come to Targets() to the other ranks that have it.
  void CopyToOtherRanks();
  absl::Status OtherHeads(int rank) const;

  TransferStore* const store_;
  ChunkHeader header_;
  std::shared_ptr<Transfer> transfer_;  // null until Begin has succeeded
  std::vector<size_t> claimed_;         // blocks that this landing writes, in the payload's order
  std::vector<Piece> pieces_;
  size_t kind_ = 0;
  std::unique_ptr<FarWrites> far_;  // null: this process sees every rank's memory
  size_t piece_ = 0;
  uint64_t offset_ = 0;  // inside pieces_[piece_]
  uint64_t left_ = 0;
  uint32_t crc_ = 0;
  bool ignored_ = false;  // every block is shared
  bool differs_ = false;  // a block that had landed was sent with other bytes
  bool finished_ = false;
};

}  // namespace sluice
