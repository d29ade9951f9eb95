// The CRC-32C (Castagnoli), bit by bit.
#pragma once

#include <cstdint>

namespace sluice::kernels::reference {

uint32_t Crc32c(const uint8_t* data, int64_t bytes);

}  // namespace sluice::kernels::reference
