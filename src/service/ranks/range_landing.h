// RangeLanding puts bytes of caches, as they come, into the ranges of a rank's pool that rank 0 has
// named. One thread at a time.
#pragma once

#include <google/protobuf/repeated_ptr_field.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "sluice/v1/ranks.pb.h"
#include "src/kv/page_pool.h"

namespace sluice {

class RangeLanding {
 public:
  // INTERNAL: the ranges do not fit the pool, or have other than `bytes` bytes. The pool outlives
  // the landing. `checksum`: the bytes are summed.
  static absl::StatusOr<RangeLanding> Begin(
      const google::protobuf::RepeatedPtrField<v1::LandRange>& ranges, uint64_t bytes,
      const PagePool& pool, bool checksum);

  // Writes, compares or drops the next bytes. REQUIRES: together they are as many as were
  // announced.
  void Append(absl::Span<const uint8_t> bytes);
  // Returns whether compared bytes were others.
  bool differs() const { return differs_; }
  uint32_t crc32c() const { return crc_; }  // with `checksum`

 private:
  struct Range {
    uint8_t* to;
    uint64_t bytes;
    bool compare, ignore;
  };
  std::vector<Range> ranges_;
  size_t range_ = 0;
  uint64_t offset_ = 0;  // inside ranges_[range_]
  uint32_t crc_ = 0;
  bool checksum_ = false;
  bool differs_ = false;
};

}  // namespace sluice
