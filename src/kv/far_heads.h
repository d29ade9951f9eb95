// FarHeads writes the bytes of chunks to ranks whose DRAM this process does not see, because they
// are on other hosts. Their pools have the shape of rank 0's, and their pages its numbers, so a
// place is a distance from the beginning of a kind's pages (PagePool::base).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace sluice {

// The writes of one chunk. One thread at a time.
class FarWrites {
 public:
  // Waits until what was written has arrived, or never will: nobody else gets its pages before.
  virtual ~FarWrites() = default;
  // Writes bytes to `offset` of a kind's pages on that rank; `compare`: compares them with what is
  // there. May wait for room on the way.
  virtual void Write(int rank, size_t kind, uint64_t offset, absl::Span<const uint8_t> bytes,
                     bool compare) = 0;
  // Waits until all of it has arrived, and returns whether compared bytes differ. UNAVAILABLE,
  // reason RANK_LOST: a rank has ended. Call it at most once, after the last Write.
  virtual absl::StatusOr<bool> Finish() = 0;
};

// Thread-safe.
class FarHeads {
 public:
  virtual ~FarHeads() = default;
  virtual std::unique_ptr<FarWrites> Begin() = 0;
};

}  // namespace sluice
