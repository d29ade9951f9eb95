#include "src/kv/chunk_landing.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/base/memory_copy.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/kv/transfer.h"
#include "src/kv/transfer_store.h"

namespace sluice {
namespace {

// Half of a small L1 data cache.
constexpr size_t kPassBytes = 16 << 10;

// Checks a header against its transfer and the size of its payload. Sets *kind to the index of the
// header's kind.
absl::Status CheckChunk(const Transfer& transfer, const ChunkHeader& h, uint64_t payload_bytes,
                        uint64_t max_chunk_bytes, size_t* kind) {
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
  if (payload_bytes > max_chunk_bytes) {
    return InvalidField("payload",
                        absl::StrCat("at most max_chunk_bytes = ", max_chunk_bytes, ", found ",
                                     payload_bytes, "; send smaller chunks"));
  }
  return absl::OkStatus();
}

// Claims the blocks of a chunk that have not landed, or none of them if another landing has one.
// Returns their indices in the payload's order. REQUIRES: the store's lock is held.
absl::StatusOr<std::vector<size_t>> Claim(Transfer& transfer, const ChunkHeader& h, size_t kind) {
  const CacheKind& k = transfer.layout().kinds[kind];
  const int64_t end_block = k.BlocksFor(h.token_end);
  std::vector<size_t> claimed;
  for (int64_t block = h.token_begin / k.block_tokens; block < end_block; ++block) {
    for (uint32_t head = h.head_begin; head < h.head_end; ++head) {
      const size_t index = transfer.BlockIndex(h.layer, kind, head, block);
      if (transfer.blocks[index] == Transfer::Block::kClaimed) {
        return WithReason(
            absl::AbortedError(absl::StrCat("layer ", h.layer, ", head ", head, ", block ", block,
                                            " is being written by another stream; send it again "
                                            "when that one has ended")),
            reasons::kBlockBusy);
      }
      if (transfer.blocks[index] == Transfer::Block::kMissing) claimed.push_back(index);
    }
  }
  for (const size_t index : claimed) transfer.blocks[index] = Transfer::Block::kClaimed;
  return claimed;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChunkLanding>> ChunkLanding::Begin(TransferStore* store,
                                                                  const ChunkHeader& h,
                                                                  uint64_t payload_bytes,
                                                                  uint64_t max_chunk_bytes) {
  std::unique_ptr<ChunkLanding> landing(new ChunkLanding(store, h, payload_bytes));
  size_t& kind = landing->kind_;
  {
    TransferStore::Lock lock(store);
    SLUICE_ASSIGN_OR_RETURN(std::shared_ptr<Transfer> transfer, store->FindLocked(h.transfer_id));
    if (transfer->state == Transfer::State::kPoisoned) return Poisoned(transfer->id);
    if (transfer->state == Transfer::State::kCommitted) {
      return WithReason(absl::FailedPreconditionError(absl::StrCat(
                            "transfer ", h.transfer_id, " is committed and takes no more chunks")),
                        reasons::kCommitted);
    }
    SLUICE_RETURN_IF_ERROR(CheckChunk(*transfer, h, payload_bytes, max_chunk_bytes, &kind));
    SLUICE_ASSIGN_OR_RETURN(landing->claimed_, Claim(*transfer, h, kind));
    ++transfer->landings;
    transfer->Renew(lock.now());
    landing->transfer_ = std::move(transfer);
  }
  landing->FindPieces();
  if (const HeadPlaces* const places = landing->transfer_->places();
      places != nullptr && places->far != nullptr) {
    landing->far_ = places->far->Begin();
  }
  return landing;
}

// Runs outside the store's lock: while this landing lives, nobody else takes the pages or its
// claims.
void ChunkLanding::FindPieces() {
  const size_t kind = kind_;
  HomeRange range;
  range.layer = static_cast<int>(header_.layer);
  range.kind = kind;
  range.head_begin = static_cast<int>(header_.head_begin);
  range.head_end = static_cast<int>(header_.head_end);
  range.token_begin = header_.token_begin;
  range.token_end = header_.token_end;
  const int64_t shared = transfer_->layout().kinds[kind].BlocksFor(transfer_->reused_tokens);
  // claimed_ is in the order of the walk: a block that is not its next one has landed before.
  auto next = claimed_.begin();
  const HeadPlaces* const places = transfer_->places();
  std::optional<size_t> claimed;  // the last block of claimed_ that was met
  const auto visit = [&](const HomePiece& at) {
    const size_t index =
        transfer_->BlockIndex(header_.layer, kind, static_cast<uint32_t>(at.head), at.block);
    if (next != claimed_.end() && *next == index) claimed = *next++;
    const Use use = claimed == index    ? Use::kWrite
                    : at.block < shared ? Use::kIgnore
                                        : Use::kCompare;
    const HeadPlaces::Place* const place =
        places == nullptr ? nullptr : &places->places[kind][static_cast<size_t>(at.head)];
    if (!pieces_.empty() && pieces_.back().use == use && pieces_.back().place == place &&
        pieces_.back().target + pieces_.back().bytes == at.data) {
      pieces_.back().bytes += at.bytes;
    } else {
      pieces_.push_back({at.data, at.bytes, use, place});
    }
  };
  transfer_->home->ForEachPiece(range, visit, places);
  ignored_ = range.token_end <= transfer_->reused_tokens;
}

void ChunkLanding::PutOrCompare(const Piece& piece, uint64_t offset,
                                absl::Span<const uint8_t> bytes) {
  static const std::vector<std::ptrdiff_t> kHere = {0};
  for (const std::ptrdiff_t distance : piece.place == nullptr ? kHere : piece.place->distances) {
    uint8_t* const target = piece.target + distance + offset;
    if (piece.use == Use::kCompare) {
      differs_ = differs_ || std::memcmp(target, bytes.data(), bytes.size()) != 0;
    } else if (piece.use == Use::kWrite) {
      // The bytes are not read again until the policy takes the sequence. Streaming stores take
      // half the time and leave the CPU's caches to the decode that runs meanwhile.
      StreamCopy(target, bytes.data(), bytes.size());
    }
  }
  if (far_ == nullptr || piece.use == Use::kIgnore) return;
  const auto at = static_cast<uint64_t>(piece.target - transfer_->home->pool()->base(kind_));
  for (const int rank : piece.place->far_ranks) {
    far_->Write(rank, kind_, at + offset, bytes, piece.use == Use::kCompare);
  }
}

void ChunkLanding::Append(absl::Span<const uint8_t> bytes) {
  SLUICE_FAILPOINT_PAUSE(kIngestLanding);
  SLUICE_CHECK(bytes.size() <= left_, "a chunk takes no more than its header implies");
  left_ -= bytes.size();
  while (!bytes.empty()) {
    const Piece& piece = pieces_[piece_];
    // The pieces are small so that the copy finds in the CPU's cache what the checksum has read.
    const size_t take = std::min<uint64_t>({bytes.size(), piece.bytes - offset_, kPassBytes});
    const absl::Span<const uint8_t> now = bytes.subspan(0, take);
    if (!ignored_) crc_ = ExtendCrc32c(crc_, now);
    PutOrCompare(piece, offset_, now);
    bytes.remove_prefix(take);
    offset_ += take;
    if (offset_ == piece.bytes) {
      ++piece_;
      offset_ = 0;
    }
  }
  // The fence comes before anyone else may read or write the pages, however this landing ends.
  FenceStreamedStores();
}

std::vector<ChunkLanding::Target> ChunkLanding::Targets() const {
  std::vector<Target> targets;
  targets.reserve(pieces_.size());
  SLUICE_CHECK(far_ == nullptr, "memory of ranks on other hosts is written by Append alone");
  for (const Piece& piece : pieces_) {
    const std::ptrdiff_t distance = piece.place == nullptr ? 0 : piece.place->distances.front();
    targets.push_back({piece.use == Use::kWrite ? piece.target + distance : nullptr, piece.bytes});
  }
  return targets;
}

absl::StatusOr<std::vector<ChunkLanding::RankTarget>> ChunkLanding::TargetsOn(int rank) const {
  std::vector<RankTarget> targets;
  targets.reserve(pieces_.size());
  for (const Piece& piece : pieces_) {
    if (piece.place == nullptr || !piece.place->IsOf(rank)) return OtherHeads(rank);
    targets.push_back({static_cast<uint64_t>(piece.target - transfer_->home->pool()->base(kind_)),
                       piece.bytes, piece.use});
  }
  return targets;
}

absl::Status ChunkLanding::OtherHeads(int rank) const {
  const HeadPlaces* const places = transfer_->places();
  std::string own;
  for (const RankHeads& heads :
       places == nullptr ? std::vector<RankHeads>() : places->OfOneRank()) {
    if (heads.rank == rank) absl::StrAppend(&own, " [", heads.begin, ", ", heads.end, ")");
  }
  return InvalidField(
      "header.head_begin, header.head_end",
      absl::StrCat("rank ", rank, " takes ", own.empty() ? "no heads" : "the heads", own,
                   " of this transfer, found [", header_.head_begin, ", ", header_.head_end,
                   "); send the others to the address at which the transfer was reserved"));
}

void ChunkLanding::Received(uint32_t crc32c, bool differs) {
  SLUICE_FAILPOINT_PAUSE(kIngestLanding);
  crc_ = crc32c;
  differs_ = differs_ || differs;
  left_ = 0;
  if (far_ == nullptr) CopyToOtherRanks();
}

void ChunkLanding::CopyToOtherRanks() {
  for (const Piece& piece : pieces_) {
    if (piece.use != Use::kWrite || piece.place == nullptr) continue;
    const std::vector<std::ptrdiff_t>& distances = piece.place->distances;
    for (size_t i = 1; i < distances.size(); ++i) {
      StreamCopy(piece.target + distances[i], piece.target + distances[0], piece.bytes);
    }
  }
  FenceStreamedStores();
}

absl::StatusOr<uint64_t> ChunkLanding::Finish() {
  SLUICE_CHECK(!finished_);
  if (left_ > 0) {
    return InvalidField("payload", absl::StrCat(left_, " bytes of it are missing"));
  }
  const ChunkHeader& h = header_;
  if (SLUICE_FAILPOINT(kIngestChecksum)) crc_ ^= 1;
  if (!ignored_ && crc_ != h.crc32c) {
    return WithReason(
        absl::DataLossError(absl::StrCat("checksum of layer ", h.layer, ", kind ", h.kind,
                                         ", heads [", h.head_begin, ", ", h.head_end, "), tokens [",
                                         h.token_begin, ", ", h.token_end, "): the header says ",
                                         h.crc32c, ", the payload has ", crc_, "; send it again")),
        reasons::kChecksumMismatch);
  }
  if (far_ != nullptr) {
    SLUICE_ASSIGN_OR_RETURN(const bool differs, far_->Finish());
    differs_ = differs_ || differs;
  }
  absl::Status poisoned;
  {
    TransferStore::Lock lock(store_);
    Transfer& transfer = *transfer_;
    if (!store_->IsOpenLocked(transfer)) {
      return WithReason(absl::NotFoundError(absl::StrCat("transfer ", transfer.id,
                                                         " ended while the chunk was landing")),
                        reasons::kTransferNotFound);
    }
    if (transfer.state == Transfer::State::kPoisoned) return Poisoned(transfer.id);
    if (!differs_) {
      for (const size_t index : claimed_) transfer.blocks[index] = Transfer::Block::kLanded;
      const uint64_t landed = claimed_.size();
      transfer.landed += landed;
      transfer.Renew(lock.now());
      claimed_.clear();
      finished_ = true;
      return landed;
    }
    transfer.state = Transfer::State::kPoisoned;
    poisoned = WithReason(
        absl::FailedPreconditionError(absl::StrCat(
            "transfer ", transfer.id, ", layer ", h.layer, ", heads [", h.head_begin, ", ",
            h.head_end, "), tokens [", h.token_begin, ", ", h.token_end,
            "): these blocks have landed with other bytes; the transfer is poisoned, abort and "
            "reserve anew")),
        reasons::kPoisoned);
    // Its Generate need not wait for the lease.
    store_->attachments().End(transfer, poisoned);
  }
  store_->Wake();
  return poisoned;
}

ChunkLanding::~ChunkLanding() {
  far_.reset();  // before the pages may be another's
  if (transfer_ != nullptr) store_->EndLanding(std::move(transfer_), claimed_);
}

}  // namespace sluice
