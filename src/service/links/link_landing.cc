#include "src/service/links/link_landing.h"

#include <utility>
#include <vector>

#include "src/base/status_macros.h"
#include "src/kv/transfer_table.h"
#include "src/service/wire/proto_conversion.h"

namespace sluice {

LinkLanding::LinkLanding(PeerLink* link, TransferTable* transfers, std::string transfer_id)
    : link_(link), transfers_(transfers), transfer_id_(std::move(transfer_id)) {}

LinkLanding::~LinkLanding() {
  if (moving()) link_->Abort("messages under way were given up");
}

LinkLanding::Part LinkLanding::Begin(const v1::LinkChunk& chunk) {
  absl::StatusOr<ChunkHeader> header = FromProto(chunk.header());
  if (!header.ok()) return {nullptr, header.status(), 0};
  header->transfer_id = transfer_id_;
  absl::StatusOr<std::unique_ptr<ChunkLanding>> begun =
      transfers_->BeginChunk(*header, chunk.bytes(), link_->message_bytes());
  if (!begun.ok()) return {nullptr, begun.status(), 0};
  return {*std::move(begun), absl::OkStatus(), chunk.bytes()};
}

absl::Status LinkLanding::Ask(Chunks chunks) {
  Message message;
  for (const v1::LinkChunk* const chunk : chunks) message.push_back(Begin(*chunk));
  return Receive(chunks, std::move(message));
}

absl::Status LinkLanding::Drop(Chunks chunks) {
  Message message(chunks.size());
  for (Part& part : message) part.refused = absl::CancelledError("nobody waits for it any more");
  return Receive(chunks, std::move(message));
}

absl::Status LinkLanding::Receive(Chunks chunks, Message message) {
  std::vector<PeerLink::Piece> pieces;
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (message[i].chunk == nullptr) {
      pieces.push_back({nullptr, chunks[i]->bytes()});
      continue;
    }
    for (const ChunkLanding::Target& target : message[i].chunk->Targets()) {
      pieces.push_back({target.data, target.bytes});
    }
  }
  coming_.push_back(std::move(message));
  return link_->Receive(pieces);
}

absl::Status LinkLanding::Arrive() {
  SLUICE_ASSIGN_OR_RETURN(const uint32_t crc, link_->Await());
  for (const Part& part : coming_.front()) {
    if (part.chunk != nullptr) part.chunk->Received(crc);
  }
  arrived_.push_back(std::move(coming_.front()));
  coming_.pop_front();
  return absl::OkStatus();
}

LinkLanding::Message LinkLanding::TakeArrived() {
  Message oldest = std::move(arrived_.front());
  arrived_.pop_front();
  return oldest;
}

std::vector<LinkLanding::Landed> LinkLanding::Finish(const Message& message) {
  std::vector<Landed> landed;
  for (const Part& part : message) {
    landed.push_back(part.chunk == nullptr ? Landed{part.refused, 0}
                                           : Landed{part.chunk->Finish(), part.bytes});
  }
  return landed;
}

std::vector<LinkLanding::Landed> LinkLanding::Land(uint32_t crc32c) {
  const Message oldest = TakeArrived();
  for (const Part& part : oldest) {
    if (part.chunk != nullptr) part.chunk->Expect(crc32c);
  }
  return Finish(oldest);
}

absl::StatusOr<std::vector<LinkLanding::Landed>> LinkLanding::Await() {
  SLUICE_RETURN_IF_ERROR(Arrive());
  return Finish(TakeArrived());
}

}  // namespace sluice
