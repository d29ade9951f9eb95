#include "src/base/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <cstddef>

namespace sluice {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected: bit 31 is x^0
constexpr uint32_t kOne = uint32_t{1} << 31;

// Returns the product of a and b modulo the polynomial.
uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; a != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    a &= ~bit;
    b = (b >> 1) ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

}  // namespace

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

Crc32cJoin::Crc32cJoin(uint64_t second_bytes) {
  uint32_t shift = kOne;
  // Powers by squaring, from x^8.
  for (uint32_t power = kOne >> 8; second_bytes > 0; second_bytes >>= 1) {
    if ((second_bytes & 1) != 0) shift = Multiply(power, shift);
    power = Multiply(power, power);
  }
  for (int n = 0; n < 8; ++n) {
    for (uint32_t v = 1; v < 16; ++v) {
      const uint32_t rest = v & (v - 1);  // without its lowest bit
      shifted_[n][v] =
          rest == 0 ? Multiply(v << (4 * n), shift) : shifted_[n][rest] ^ shifted_[n][v ^ rest];
    }
  }
}

uint32_t Crc32cJoin::operator()(uint32_t first, uint32_t second) const {
  uint32_t joined = second;
  for (int n = 0; n < 8; ++n) joined ^= shifted_[n][(first >> (4 * n)) & 15];
  return joined;
}

}  // namespace sluice
