// Lands one chunk in the transfer table, as ParseWriteRequest reads it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "src/base/status_macros.h"
#include "src/kv/transfer_table.h"
#include "src/service/ingest/write_parser.h"

namespace sluice {

class LandingSink : public ChunkSink {
 public:
  // If there is a transfer_id, chunks land in it whatever their headers say. Without one, they
  // land in the transfer that their headers name.
  explicit LandingSink(TransferTable* transfers, std::string transfer_id = "")
      : transfers_(transfers),
        transfer_id_(std::move(transfer_id)),
        given_(!transfer_id_.empty()) {}

  absl::Status Begin(const ChunkHeader& header, uint64_t payload_bytes) override {
    ChunkHeader own = header;
    if (given_) {
      own.transfer_id = transfer_id_;
    } else {
      transfer_id_ = header.transfer_id;
    }
    SLUICE_ASSIGN_OR_RETURN(landing_, transfers_->BeginChunk(own, payload_bytes));
    bytes_ = payload_bytes;
    return absl::OkStatus();
  }
  void Append(absl::Span<const uint8_t> bytes) override { landing_->Append(bytes); }

  // Returns the number of blocks that are new.
  absl::StatusOr<uint64_t> Finish() { return landing_->Finish(); }
  const std::string& transfer_id() const { return transfer_id_; }
  uint64_t bytes() const { return bytes_; }

 private:
  TransferTable* const transfers_;
  std::unique_ptr<ChunkLanding> landing_;
  std::string transfer_id_;
  const bool given_;
  uint64_t bytes_ = 0;
};

}  // namespace sluice
