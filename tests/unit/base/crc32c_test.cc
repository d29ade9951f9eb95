#include "src/base/crc32c.h"

#include <catch2/catch.hpp>
#include <vector>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

TEST_CASE("crc32c has the published check value") {
  const std::string text = "123456789";
  CHECK(Crc32c({reinterpret_cast<const uint8_t*>(text.data()), text.size()}) == 0xE3069283u);
  CHECK(Crc32c({}) == 0);
}

TEST_CASE("a crc32c taken in pieces is that of the whole, wherever it is cut") {
  SplitMix64 random(TestSeed());
  std::vector<uint8_t> bytes(1000);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  const absl::Span<const uint8_t> all(bytes);
  for (size_t cut = 0; cut <= all.size(); cut += 1 + random.Below(9)) {
    INFO("cut at " << cut);
    CHECK(ExtendCrc32c(Crc32c(all.subspan(0, cut)), all.subspan(cut)) == Crc32c(all));
  }
}

TEST_CASE("the crc32c of two pieces is made of theirs, wherever they meet") {
  SplitMix64 random(TestSeed());
  std::vector<uint8_t> bytes(70'000);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  const absl::Span<const uint8_t> all(bytes);
  for (size_t cut = 0; cut <= all.size(); cut += 1 + random.Below(700)) {
    INFO("cut at " << cut);
    const Crc32cJoin join(all.size() - cut);
    CHECK(join(Crc32c(all.subspan(0, cut)), Crc32c(all.subspan(cut))) == Crc32c(all));
  }
  CHECK(Crc32cJoin(0)(Crc32c(all), Crc32c({})) == Crc32c(all));
}

}  // namespace
}  // namespace sluice
