#include "src/service/ingest/transfer_writes.h"

#include "src/base/status_macros.h"

namespace sluice {

absl::Status TransferWrites::Begin(const ChunkHeader& header, uint64_t payload_bytes) {
  landing_.reset();
  transfer_id_.clear();
  if (!tenant_.empty() && header.transfer_id != owned_) {
    SLUICE_RETURN_IF_ERROR(transfers_->CheckOwner(header.transfer_id, tenant_));
  }
  transfer_id_ = header.transfer_id.substr(0, kMaxNameBytes);
  SLUICE_ASSIGN_OR_RETURN(landing_, transfers_->BeginChunk(header, payload_bytes));
  owned_ = transfer_id_;
  bytes_ = payload_bytes;
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> TransferWrites::Finish() {
  if (begun_ != transfer_id_) {
    begun_ = transfer_id_;
    watch_->StreamBegan(transfer_id_);
  }
  absl::StatusOr<uint64_t> blocks = landing_->Finish();
  landing_.reset();
  watch_->ChunkEnded(blocks, bytes_);
  return blocks;
}

void TransferWrites::Ended(const absl::Status& status) {
  landing_.reset();
  if (!status.ok()) watch_->StreamBroke(transfer_id_, status);
}

}  // namespace sluice
