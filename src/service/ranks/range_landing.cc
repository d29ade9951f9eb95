#include "src/service/ranks/range_landing.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "src/base/crc32c.h"
#include "src/base/failpoint.h"
#include "src/base/memory_copy.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

// Half of a small L1 data cache, so that the copy finds there what the checksum has read.
constexpr uint64_t kPassBytes = 16 << 10;

}  // namespace

absl::StatusOr<RangeLanding> RangeLanding::Begin(
    const google::protobuf::RepeatedPtrField<v1::LandRange>& ranges, uint64_t bytes,
    const PagePool& pool, bool checksum) {
  RangeLanding out;
  out.checksum_ = checksum;
  uint64_t left = bytes;
  for (const v1::LandRange& range : ranges) {
    const size_t kind = range.kind();
    if (kind >= pool.layout().kinds.size() || range.bytes() > left ||
        range.offset() > pool.kind_bytes(kind) ||
        range.bytes() > pool.kind_bytes(kind) - range.offset()) {
      return absl::InternalError(absl::StrCat("ranks differ: bytes for kind ", kind, " at ",
                                              range.offset(), " do not fit this rank's pages"));
    }
    left -= range.bytes();
    if (range.bytes() == 0) continue;
    out.ranges_.push_back(
        {pool.base(kind) + range.offset(), range.bytes(), range.compare(), range.ignore()});
  }
  if (left > 0) {
    return absl::InternalError(absl::StrCat("ranks differ: ", left, " bytes have no place"));
  }
  return out;
}

void RangeLanding::Append(absl::Span<const uint8_t> bytes) {
  SLUICE_FAILPOINT_PAUSE(kIngestLanding);
  while (!bytes.empty()) {
    SLUICE_CHECK(range_ < ranges_.size(), "more bytes come than were announced");
    const Range& range = ranges_[range_];
    const auto take =
        static_cast<size_t>(std::min({uint64_t{bytes.size()}, range.bytes - offset_, kPassBytes}));
    const absl::Span<const uint8_t> now = bytes.subspan(0, take);
    if (checksum_) crc_ = ExtendCrc32c(crc_, now);
    if (range.compare) {
      differs_ = differs_ || std::memcmp(range.to + offset_, now.data(), take) != 0;
    } else if (!range.ignore) {
      StreamCopy(range.to + offset_, now.data(), take);
    }
    bytes.remove_prefix(take);
    offset_ += take;
    if (offset_ == range.bytes) {
      ++range_;
      offset_ = 0;
    }
  }
  // The fence comes before anyone else may read or write the pages.
  FenceStreamedStores();
}

}  // namespace sluice
