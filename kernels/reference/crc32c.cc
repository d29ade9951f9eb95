#include "kernels/reference/crc32c.h"

namespace sluice::kernels::reference {

uint32_t Crc32c(const uint8_t* data, int64_t bytes) {
  uint32_t crc = 0xFFFFFFFFu;
  for (int64_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0);
  }
  return ~crc;
}

}  // namespace sluice::kernels::reference
