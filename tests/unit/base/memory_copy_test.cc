#include "src/base/memory_copy.h"

#include <catch2/catch.hpp>
#include <vector>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

TEST_CASE("a streamed copy is byte for byte what memcpy gives, wherever it begins and ends") {
  SplitMix64 random(TestSeed());
  std::vector<uint8_t> from(5000), to(5200);
  for (uint8_t& byte : from) byte = static_cast<uint8_t>(random());
  for (int i = 0; i < 2000; ++i) {
    const size_t source = random.Below(200), target = 64 + random.Below(80);
    const size_t bytes = i < 600 ? static_cast<size_t>(i) : random.Below(4800);
    std::fill(to.begin(), to.end(), uint8_t{0xA5});
    StreamCopy(to.data() + target, from.data() + source, bytes);
    FenceStreamedStores();
    bool right = true;
    for (size_t at = 0; at < to.size(); ++at) {
      const bool inside = at >= target && at < target + bytes;
      right = right && to[at] == (inside ? from[source + at - target] : 0xA5);
    }
    INFO(bytes << " bytes from " << source << " to " << target);
    REQUIRE(right);
  }
}

}  // namespace
}  // namespace sluice
