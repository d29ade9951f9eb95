#include "src/service/ingest/claimed_writes.h"

#include "src/base/status_macros.h"
#include "src/kv/transfer_table.h"
#include "src/service/ingest/transfer_writes.h"
#include "src/service/wire/proto_conversion.h"

namespace sluice {
namespace {

class TransferClaims final : public ClaimStream {
 public:
  TransferClaims(int rank, TransferTable* transfers, TransferWatch* watch)
      : rank_(rank), transfers_(transfers), watch_(watch) {}

  absl::Status Take(const v1::ClaimRequest& request, v1::ClaimAnswer* answer) override {
    absl::Status status = Step(request, answer);
    if (!status.ok() && writes_ != nullptr) writes_->Ended(status);
    return status;
  }
  bool claimed() const override { return writes_ != nullptr && writes_->landing() != nullptr; }

 private:
  absl::Status Step(const v1::ClaimRequest& request, v1::ClaimAnswer* answer) {
    if (request.has_begin()) return Begin(request.begin(), answer);
    if (request.has_end()) return End(request.end(), answer);
    if (writes_ != nullptr) {
      writes_->Ended(absl::Status(static_cast<absl::StatusCode>(request.broke().code()),
                                  request.broke().message()));
    }
    return absl::OkStatus();
  }

  absl::Status Begin(const v1::ClaimRequest::Begin& begin, v1::ClaimAnswer* answer) {
    if (writes_ == nullptr) {
      writes_ = std::make_unique<TransferWrites>(transfers_, watch_, begin.tenant());
    }
    SLUICE_ASSIGN_OR_RETURN(const ChunkHeader header, FromProto(begin.header()));
    SLUICE_RETURN_IF_ERROR(writes_->Begin(header, begin.payload_bytes()));
    const ChunkLanding& landing = *writes_->landing();
    SLUICE_ASSIGN_OR_RETURN(const auto targets, landing.TargetsOn(rank_));
    for (const ChunkLanding::RankTarget& target : targets) {
      v1::LandRange* const range = answer->add_ranges();
      range->set_kind(static_cast<uint32_t>(landing.kind()));
      range->set_offset(target.offset);
      range->set_bytes(target.bytes);
      range->set_compare(target.use == ChunkLanding::Use::kCompare);
      range->set_ignore(target.use == ChunkLanding::Use::kIgnore);
    }
    return absl::OkStatus();
  }

  absl::Status End(const v1::ClaimRequest::End& end, v1::ClaimAnswer* answer) {
    if (!claimed()) return absl::InternalError("ranks differ: a chunk ends that has not begun");
    writes_->landing()->Received(end.crc32c(), end.differs());
    SLUICE_ASSIGN_OR_RETURN(const uint64_t blocks, writes_->Finish());
    answer->set_blocks_landed(blocks);
    answer->set_blocks_missing(writes_->BlocksMissing());
    return absl::OkStatus();
  }

  const int rank_;
  TransferTable* const transfers_;
  TransferWatch* const watch_;
  std::unique_ptr<TransferWrites> writes_;  // null before the first chunk
};

}  // namespace

std::unique_ptr<ClaimStream> NewClaimStream(int rank, TransferTable* transfers,
                                            TransferWatch* watch) {
  return std::make_unique<TransferClaims>(rank, transfers, watch);
}

absl::Status ClaimedWrites::Begin(const ChunkHeader& header, uint64_t payload_bytes) {
  if (call_ == nullptr) call_ = link_->NewClaimCall();
  v1::ClaimRequest::Begin begin;
  *begin.mutable_header() = ToProto(header);
  begin.set_payload_bytes(payload_bytes);
  begin.set_tenant(tenant_);
  SLUICE_ASSIGN_OR_RETURN(const v1::ClaimAnswer claimed, call_->Begin(std::move(begin)));
  SLUICE_ASSIGN_OR_RETURN(landing_, RangeLanding::Begin(claimed.ranges(), payload_bytes, *pool_,
                                                        /*checksum=*/true));
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ClaimedWrites::Finish() {
  SLUICE_ASSIGN_OR_RETURN(const v1::ClaimAnswer landed,
                          call_->End(landing_.crc32c(), landing_.differs()));
  blocks_missing_ = landed.blocks_missing();
  return landed.blocks_landed();
}

void ClaimedWrites::Ended(const absl::Status& status) {
  if (call_ == nullptr) return;
  if (!status.ok()) call_->Broke(status);
  call_.reset();
}

}  // namespace sluice
