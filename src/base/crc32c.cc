#include "src/base/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <cstddef>

namespace sluice {

uint32_t ExtendCrc32c(uint32_t crc, absl::Span<const uint8_t> bytes) {
  crc = ~crc;
  while (!bytes.empty()) {
    // ISA-L takes an int of bytes and does not write to them, whatever its signature says.
    const size_t take = std::min<size_t>(bytes.size(), 1 << 30);
    crc = crc32_iscsi(const_cast<unsigned char*>(bytes.data()), static_cast<int>(take), crc);
    bytes.remove_prefix(take);
  }
  return ~crc;
}

}  // namespace sluice
