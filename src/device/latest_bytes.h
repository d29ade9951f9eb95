// LatestBytes holds the newest of what one thread posts, for readers of other threads and of other
// processes that map the same memory. Nobody waits for anybody: a reader that meets a write tries
// again, a few times. Memory of zeros, as new shared memory is, holds nothing yet.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"

namespace sluice {

class LatestBytes {
 public:
  static constexpr size_t kMostBytes = size_t{32} << 10;

  // Puts `bytes` in the place of what was posted before. One thread at a time. REQUIRES: at most
  // kMostBytes.
  void Post(absl::Span<const uint8_t> bytes);
  // Returns what was posted last. Returns nothing if nothing was posted yet, or if every attempt
  // met a write, as all do behind a process that died in one. Any thread.
  std::optional<std::vector<uint8_t>> Read() const;

 private:
  // A sequence lock: the version is odd while a write is under way.
  std::atomic<uint32_t> version_{0};
  std::atomic<uint32_t> bytes_{0};
  std::array<std::atomic<uint64_t>, kMostBytes / sizeof(uint64_t)> words_{};
};

}  // namespace sluice
