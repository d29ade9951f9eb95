// How a chunk gets into its pages: checked against the transfer, claimed block by block, copied,
// and counted only when its checksum holds.
#include <algorithm>
#include <cstring>

extern "C" {
#include <isa-l/crc.h>
}

#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/kv/transfer.h"
#include "src/kv/transfer_table.h"

namespace sluice {

absl::Status TransferTable::CheckChunk(const Transfer& transfer, const ChunkHeader& h, size_t* kind,
                                       uint64_t payload_bytes) const {
  const CacheLayout& layout = transfer.layout();
  if (h.layer >= static_cast<uint32_t>(layout.layers)) {
    return InvalidField("header.layer", absl::StrCat("the model has layers 0 to ",
                                                     layout.layers - 1, ", found ", h.layer));
  }
  const int found = layout.FindKind(h.kind);
  if (found < 0) {
    std::string known;
    for (const CacheKind& k : layout.kinds)
      absl::StrAppend(&known, known.empty() ? "" : ", ", k.name);
    return InvalidField("header.kind", absl::StrCat("must be one of ", known, ", found '",
                                                    h.kind.substr(0, 64), "'"));
  }
  *kind = static_cast<size_t>(found);
  const CacheKind& k = layout.kinds[*kind];
  if (h.head_begin >= h.head_end || h.head_end > static_cast<uint32_t>(k.heads)) {
    return InvalidField("header.head_begin, header.head_end",
                        absl::StrCat("must be a range inside [0, ", k.heads, "), found [",
                                     h.head_begin, ", ", h.head_end, ")"));
  }
  const auto block = static_cast<uint32_t>(k.block_tokens);
  if (h.token_begin >= h.token_end || h.token_end > transfer.context_length) {
    return InvalidField("header.token_begin, header.token_end",
                        absl::StrCat("must be a range inside [0, ", transfer.context_length,
                                     "), found [", h.token_begin, ", ", h.token_end, ")"));
  }
  if (h.token_begin % block != 0) {
    return InvalidField("header.token_begin", absl::StrCat("must begin on a block of ", block,
                                                           " tokens, found ", h.token_begin));
  }
  if (h.token_end % block != 0 && h.token_end != transfer.context_length) {
    return InvalidField("header.token_end",
                        absl::StrCat("must end on a block of ", block, " tokens or at ",
                                     transfer.context_length, ", found ", h.token_end));
  }
  // At most 2^32 tokens x 2^32 heads x bytes_per_token could overflow; both ranges were checked
  // against what is reserved, so the product is at most the size of the transfer's pages.
  const uint64_t expected = uint64_t{h.token_end - h.token_begin} * (h.head_end - h.head_begin) *
                            static_cast<uint64_t>(k.bytes_per_token);
  if (payload_bytes != expected) {
    return InvalidField(
        "payload", absl::StrCat("its ranges imply ", expected, " bytes, found ", payload_bytes));
  }
  if (payload_bytes > options_.max_chunk_bytes) {
    return InvalidField(
        "payload", absl::StrCat("at most max_chunk_bytes = ", options_.max_chunk_bytes, ", found ",
                                payload_bytes, "; send smaller chunks"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ChunkLanding>> TransferTable::BeginChunk(const ChunkHeader& h,
                                                                        uint64_t payload_bytes) {
  absl::MutexLock lock(&mutex_);
  SLUICE_ASSIGN_OR_RETURN(const std::shared_ptr<Transfer> transfer, FindLocked(h.transfer_id));
  if (transfer->state == Transfer::State::kPoisoned) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "transfer ", h.transfer_id, " is poisoned; abort and reserve anew")),
                      "POISONED");
  }
  if (transfer->state == Transfer::State::kCommitted) {
    return WithReason(absl::FailedPreconditionError(absl::StrCat(
                          "transfer ", h.transfer_id, " is committed and takes no more chunks")),
                      "COMMITTED");
  }
  size_t kind = 0;
  SLUICE_RETURN_IF_ERROR(CheckChunk(*transfer, h, &kind, payload_bytes));
  const CacheKind& k = transfer->layout().kinds[kind];
  const int64_t first_block = h.token_begin / static_cast<uint32_t>(k.block_tokens);
  const int64_t end_block = k.BlocksFor(h.token_end);

  std::vector<size_t> claimed;
  for (int64_t block = first_block; block < end_block; ++block) {
    for (uint32_t head = h.head_begin; head < h.head_end; ++head) {
      const size_t index = transfer->BlockIndex(h.layer, kind, head, block);
      if (transfer->blocks[index] == Transfer::Block::kClaimed) {
        return WithReason(
            absl::AbortedError(absl::StrCat("layer ", h.layer, ", head ", head, ", block ", block,
                                            " is being written by another stream; send it again "
                                            "when that one has ended")),
            "BLOCK_BUSY");
      }
      if (transfer->blocks[index] == Transfer::Block::kMissing) claimed.push_back(index);
    }
  }
  for (const size_t index : claimed) transfer->blocks[index] = Transfer::Block::kClaimed;
  ++transfer->landings;
  transfer->lease_end = clock_->Now() + transfer->lease;

  std::unique_ptr<ChunkLanding> landing(new ChunkLanding);
  landing->table_ = this;
  landing->transfer_ = transfer;
  landing->header_ = h;
  landing->left_ = payload_bytes;
  landing->claimed_ = std::move(claimed);
  const int64_t part_token_bytes = k.bytes_per_token / k.parts;
  for (int64_t block = first_block; block < end_block; ++block) {
    const int64_t tokens = std::min<int64_t>(k.block_tokens, h.token_end - block * k.block_tokens);
    for (uint32_t head = h.head_begin; head < h.head_end; ++head) {
      uint8_t* home = transfer->home->BlockAddress(static_cast<int>(h.layer), kind,
                                                   static_cast<int>(head), block);
      const bool landed = transfer->blocks[transfer->BlockIndex(h.layer, kind, head, block)] ==
                          Transfer::Block::kLanded;
      for (int part = 0; part < k.parts; ++part) {
        uint8_t* target = home + part * k.block_tokens * part_token_bytes;
        const auto bytes = static_cast<uint64_t>(tokens * part_token_bytes);
        auto& pieces = landing->pieces_;
        if (!pieces.empty() && pieces.back().landed == landed &&
            pieces.back().target + pieces.back().bytes == target) {
          pieces.back().bytes += bytes;
        } else {
          pieces.push_back({target, bytes, landed});
        }
      }
    }
  }
  return landing;
}

void ChunkLanding::Append(absl::Span<const uint8_t> bytes) {
  SLUICE_CHECK(bytes.size() <= left_, "a chunk takes no more than its header implies");
  crc_ = ~crc32_iscsi(const_cast<uint8_t*>(bytes.data()), static_cast<int>(bytes.size()), ~crc_);
  left_ -= bytes.size();
  while (!bytes.empty()) {
    const Piece& piece = pieces_[piece_];
    const size_t take = std::min<uint64_t>(bytes.size(), piece.bytes - offset_);
    if (piece.landed) {
      differs_ = differs_ || std::memcmp(piece.target + offset_, bytes.data(), take) != 0;
    } else {
      std::memcpy(piece.target + offset_, bytes.data(), take);
    }
    bytes.remove_prefix(take);
    offset_ += take;
    if (offset_ == piece.bytes) {
      ++piece_;
      offset_ = 0;
    }
  }
}

absl::StatusOr<uint64_t> ChunkLanding::Finish() {
  SLUICE_CHECK(!finished_);
  if (left_ > 0) {
    return InvalidField("payload", absl::StrCat(left_, " bytes of it are missing"));
  }
  return table_->FinishChunk(*this);
}

ChunkLanding::~ChunkLanding() { table_->AbandonChunk(*this); }

absl::StatusOr<uint64_t> TransferTable::FinishChunk(ChunkLanding& landing) {
  const ChunkHeader& h = landing.header_;
  if (landing.crc_ != h.crc32c) {
    return WithReason(
        absl::DataLossError(absl::StrCat(
            "checksum of layer ", h.layer, ", kind ", h.kind, ", heads [", h.head_begin, ", ",
            h.head_end, "), tokens [", h.token_begin, ", ", h.token_end, "): the header says ",
            h.crc32c, ", the payload has ", landing.crc_, "; send it again")),
        "CHECKSUM_MISMATCH");
  }
  absl::MutexLock lock(&mutex_);
  Transfer& transfer = *landing.transfer_;
  if (!transfers_.contains(transfer.id)) {
    return WithReason(absl::NotFoundError(absl::StrCat("transfer ", transfer.id,
                                                       " ended while the chunk was landing")),
                      "TRANSFER_NOT_FOUND");
  }
  if (landing.differs_) {
    transfer.state = Transfer::State::kPoisoned;
    if (transfer.attached != 0) {
      // Its Generate need not wait for the lease.
      const auto it = attachments_.find(transfer.attached);
      if (it != attachments_.end()) {
        it->second.ended = WithReason(
            absl::FailedPreconditionError(absl::StrCat("transfer ", transfer.id,
                                                       " is poisoned: a landed block "
                                                       "was sent again with other bytes")),
            "POISONED");
        it->second.transfer = nullptr;
      }
      transfer.attached = 0;
    }
    return WithReason(absl::FailedPreconditionError(
                          absl::StrCat("layer ", h.layer, ", heads [", h.head_begin, ", ",
                                       h.head_end, "), tokens [", h.token_begin, ", ", h.token_end,
                                       "): these blocks have landed with other bytes; the "
                                       "transfer is poisoned, abort and reserve anew")),
                      "POISONED");
  }
  for (const size_t index : landing.claimed_) transfer.blocks[index] = Transfer::Block::kLanded;
  transfer.landed += landing.claimed_.size();
  transfer.lease_end = clock_->Now() + transfer.lease;
  const uint64_t landed = landing.claimed_.size();
  landing.claimed_.clear();
  landing.finished_ = true;
  return landed;
}

void TransferTable::AbandonChunk(ChunkLanding& landing) {
  bool wake = false;
  std::shared_ptr<Transfer> transfer;
  {
    absl::MutexLock lock(&mutex_);
    transfer = std::move(landing.transfer_);
    for (const size_t index : landing.claimed_) {
      transfer->blocks[index] = Transfer::Block::kMissing;
    }
    wake = --transfer->landings == 0 && transfer->state != Transfer::State::kReceiving;
  }
  transfer.reset();  // the last owner gives the pages back, outside the lock
  if (wake) Wake();
}

}  // namespace sluice
