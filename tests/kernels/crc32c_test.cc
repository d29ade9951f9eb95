#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "kernels/reference/crc32c.h"

namespace sluice::kernels {
namespace {

// RFC 3720, B.4.
TEST_CASE("the reference's checksums are those of the standard", "[kernels]") {
  const auto of = [](const std::vector<uint8_t>& bytes) {
    return reference::Crc32c(bytes.data(), static_cast<int64_t>(bytes.size()));
  };
  CHECK(of({}) == 0);
  CHECK(of({'1', '2', '3', '4', '5', '6', '7', '8', '9'}) == 0xE3069283);
  CHECK(of(std::vector<uint8_t>(32, 0)) == 0x8A9136AA);
  CHECK(of(std::vector<uint8_t>(32, 0xFF)) == 0x62A8AB43);
}

}  // namespace
}  // namespace sluice::kernels
