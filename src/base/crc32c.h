// CRC-32C (Castagnoli), the checksum of chunks on the wire. Pure functions.
#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace sluice {

// Returns the checksum of the data that `crc` covers, followed by `bytes`. The checksum of no data
// is 0.
uint32_t ExtendCrc32c(uint32_t crc, absl::Span<const uint8_t> bytes);

inline uint32_t Crc32c(absl::Span<const uint8_t> bytes) { return ExtendCrc32c(0, bytes); }

// Computes the checksum of two pieces from the checksums of each, if the length of the second is
// known in advance. It is meant for many pieces of one length. A call takes some ten nanoseconds.
class Crc32cJoin {
 public:
  explicit Crc32cJoin(uint64_t second_bytes);
  uint32_t operator()(uint32_t first, uint32_t second) const;

 private:
  // [n][v] is v at the n-th four bits of a checksum, times x^(8 second_bytes) modulo the
  // polynomial. One product takes 32 steps, and a long prompt has a checksum for each of 10^5
  // blocks.
  uint32_t shifted_[8][16] = {};
};

}  // namespace sluice
