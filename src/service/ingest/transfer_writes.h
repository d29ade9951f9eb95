// Lands the chunks of one stream in the transfers of this node, and notes what becomes of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/kv/transfer_table.h"
#include "src/service/ingest/transfer_watch.h"
#include "src/service/ingest/write_stream.h"

namespace sluice {

class TransferWrites final : public WriteTarget {
 public:
  // Both outlive this. `tenant` is the only tenant whose transfers are written to; empty: any.
  TransferWrites(TransferTable* transfers, TransferWatch* watch, std::string tenant)
      : transfers_(transfers), watch_(watch), tenant_(std::move(tenant)) {}

  absl::Status Begin(const ChunkHeader& header, uint64_t payload_bytes) override;
  void Append(absl::Span<const uint8_t> bytes) override { landing_->Append(bytes); }
  absl::StatusOr<uint64_t> Finish() override;
  uint64_t BlocksMissing() override { return transfers_->BlocksMissing(transfer_id_); }
  void Ended(const absl::Status& status) override;

  // Returns the chunk that has begun; null: there is none.
  ChunkLanding* landing() { return landing_.get(); }
  const ChunkLanding* landing() const { return landing_.get(); }

 private:
  TransferTable* const transfers_;
  TransferWatch* const watch_;
  const std::string tenant_;
  std::unique_ptr<ChunkLanding> landing_;
  uint64_t bytes_ = 0;       // of the chunk that has begun
  std::string transfer_id_;  // named by the last chunk that the caller may write
  std::string owned_;        // the last transfer that was found to be the caller's
  std::string begun_;        // the last transfer of which a chunk came whole
};

}  // namespace sluice
