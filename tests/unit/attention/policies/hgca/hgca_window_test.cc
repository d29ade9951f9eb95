#include "src/attention/policies/hgca/window.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

TEST_CASE(
    "a window evicts ceil((l_cur - l_max + 1) / blk_size) blocks, and none before it is full") {
  const HgcaWindow window{32, 4};  // l_max = 128
  CHECK(window.Evicted(0, 0) == 0);
  CHECK(window.Evicted(126, 1) == 0);   // l_cur = 127
  CHECK(window.Evicted(127, 1) == 1);   // 128: ceil(1 / 32)
  CHECK(window.Evicted(100, 59) == 1);  // 159: ceil(32 / 32)
  CHECK(window.Evicted(100, 60) == 2);  // 160: ceil(33 / 32)
  CHECK(window.Evicted(96, 1000) == static_cast<int64_t>(std::ceil((1096 - 128 + 1) / 32.0)));
}

TEST_CASE("tokens that come one by one, in runs or at once leave the same blocks outside") {
  SplitMix64 random(TestSeed());
  for (int round = 0; round < 200; ++round) {
    const HgcaWindow window{int64_t{1} << random.Below(6),
                            static_cast<int64_t>(1 + random.Below(8))};
    int64_t tokens = 0, size = 0, outside = 0;
    while (tokens < 1000) {
      const auto added = static_cast<int64_t>(1 + (random.Below(4) == 0 ? random.Below(300) : 0));
      const int64_t evicted = window.Evicted(size, added);
      const auto over = static_cast<double>(size + added - window.tokens() + 1);
      const double blocks = std::ceil(over / static_cast<double>(window.block_tokens));
      REQUIRE(evicted == (over < 1 ? 0 : static_cast<int64_t>(blocks)));
      tokens += added;
      outside += evicted;
      size += added - evicted * window.block_tokens;
      // The row at position `tokens` is the next one.
      REQUIRE(window.BlocksOutside(tokens) == outside);
      // A block leaves so that the row fits, and the window is as long as whole blocks let it be.
      REQUIRE(size < window.tokens());
      if (outside > 0) REQUIRE(size >= window.tokens() - window.block_tokens);
    }
  }
}

TEST_CASE("a token is salient above beta / size, and any token where beta is 0") {
  CHECK(IsSalient(0.0101f, 1.0f, 100));
  CHECK_FALSE(IsSalient(0.0099f, 1.0f, 100));
  CHECK_FALSE(IsSalient(0.0078125f, 1.0f, 128));  // 1 / 128 exactly: not above
  CHECK(IsSalient(0.0078126f, 1.0f, 128));
  CHECK(IsSalient(0.0051f, 0.5f, 100));
  CHECK_FALSE(IsSalient(0.0199f, 2.0f, 100));
  CHECK(IsSalient(0.0f, 0.0f, 100));
  CHECK_FALSE(IsSalient(0.0f, 1e-6f, 100));
}

TEST_CASE("an average that began at 0 is put right: equal weights average to that weight") {
  for (const float alpha : {0.05f, 0.3f, 1.0f}) {
    double average = 0;
    for (int rows = 1; rows <= 40; ++rows) {
      average = (1 - double{alpha}) * average + double{alpha} * 0.02;
      CHECK(average * StartCorrection(alpha, rows) == Approx(0.02).epsilon(1e-5));
    }
  }
}

}  // namespace
}  // namespace sluice
