// Chunks that come to the port of a rank other than 0, from both ends of RankService.Claim: that
// rank puts the payload into its pages, and rank 0 has the transfer.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/kv/page_pool.h"
#include "src/service/ingest/transfer_watch.h"
#include "src/service/ingest/write_stream.h"
#include "src/service/ranks/chunk_claims.h"
#include "src/service/ranks/range_landing.h"
#include "src/service/ranks/rank_link.h"

namespace sluice {

// Makes rank 0's end of a stream of that rank. Both outlive it.
std::unique_ptr<ClaimStream> NewClaimStream(int rank, TransferTable* transfers,
                                            TransferWatch* watch);

// The other rank's end. A stream that has no chunk asks rank 0 nothing.
class ClaimedWrites final : public WriteTarget {
 public:
  // Both outlive this. `tenant` as in TransferWrites.
  ClaimedWrites(RankLink* link, const PagePool* pool, std::string tenant)
      : link_(link), pool_(pool), tenant_(std::move(tenant)) {}

  absl::Status Begin(const ChunkHeader& header, uint64_t payload_bytes) override;
  void Append(absl::Span<const uint8_t> bytes) override { landing_.Append(bytes); }
  absl::StatusOr<uint64_t> Finish() override;
  uint64_t BlocksMissing() override { return blocks_missing_; }
  void Ended(const absl::Status& status) override;

 private:
  RankLink* const link_;
  const PagePool* const pool_;
  const std::string tenant_;
  std::unique_ptr<ClaimCall> call_;  // null: there was no chunk yet
  RangeLanding landing_;
  uint64_t blocks_missing_ = 0;
};

}  // namespace sluice
