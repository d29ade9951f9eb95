#include "src/service/links/link_landing.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "src/base/status_macros.h"
#include "src/kv/transfer_table.h"

namespace sluice {

LinkLanding::LinkLanding(PeerLink* link, TransferTable* transfers, std::string transfer_id)
    : link_(link), transfers_(transfers), transfer_id_(std::move(transfer_id)) {}

LinkLanding::~LinkLanding() {
  if (moving()) link_->Abort("messages under way were given up");
}

absl::Status LinkLanding::Ask(const v1::LinkChunk& chunk) {
  const v1::ChunkHeader& h = chunk.header();
  ChunkHeader header;
  header.transfer_id = transfer_id_;
  header.kind = h.kind();
  for (const auto& [from, to] : {std::pair{h.layer(), &header.layer},
                                 {h.head_begin(), &header.head_begin},
                                 {h.head_end(), &header.head_end},
                                 {h.token_begin(), &header.token_begin},
                                 {h.token_end(), &header.token_end}}) {
    *to = static_cast<uint32_t>(std::min<uint64_t>(from, UINT32_MAX));  // refused as it is
  }
  header.crc32c = h.crc32c();
  absl::StatusOr<std::unique_ptr<ChunkLanding>> begun =
      transfers_->BeginChunk(header, chunk.bytes(), link_->message_bytes());
  if (!begun.ok()) return Drop(chunk, begun.status());
  std::vector<PeerLink::Piece> pieces;
  for (const ChunkLanding::Target& target : (*begun)->Targets()) {
    pieces.push_back({target.data, target.bytes});
  }
  coming_.push_back({*std::move(begun), absl::OkStatus(), chunk.bytes()});
  return link_->Receive(pieces);
}

absl::Status LinkLanding::Drop(const v1::LinkChunk& chunk) {
  return Drop(chunk, absl::CancelledError("nobody waits for it any more"));
}

absl::Status LinkLanding::Drop(const v1::LinkChunk& chunk, const absl::Status& why) {
  const PeerLink::Piece piece = {nullptr, chunk.bytes()};
  coming_.push_back({nullptr, why, 0});
  return link_->Receive({&piece, 1});
}

absl::Status LinkLanding::Arrive() {
  SLUICE_ASSIGN_OR_RETURN(const uint32_t crc, link_->Await());
  if (coming_.front().chunk != nullptr) coming_.front().chunk->Received(crc);
  arrived_.push_back(std::move(coming_.front()));
  coming_.pop_front();
  return absl::OkStatus();
}

LinkLanding::Landed LinkLanding::Finish(const Coming& message) {
  if (message.chunk == nullptr) return {message.refused, 0};
  return {message.chunk->Finish(), message.bytes};
}

LinkLanding::Landed LinkLanding::Land(uint32_t crc32c) {
  const Coming oldest = std::move(arrived_.front());
  arrived_.pop_front();
  if (oldest.chunk != nullptr) oldest.chunk->Expect(crc32c);
  return Finish(oldest);
}

absl::StatusOr<LinkLanding::Landed> LinkLanding::Await() {
  SLUICE_RETURN_IF_ERROR(Arrive());
  const Coming oldest = std::move(arrived_.front());
  arrived_.pop_front();
  return Finish(oldest);
}

}  // namespace sluice
