// CRC-32C (Castagnoli), the checksum of chunks on the wire. Pure functions.
#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace sluice {

// The checksum of what `crc` covers with `bytes` after it. That of nothing is 0.
uint32_t ExtendCrc32c(uint32_t crc, absl::Span<const uint8_t> bytes);

inline uint32_t Crc32c(absl::Span<const uint8_t> bytes) { return ExtendCrc32c(0, bytes); }

}  // namespace sluice
