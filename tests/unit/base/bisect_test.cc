#include "src/base/bisect.h"

#include <catch2/catch.hpp>
#include <limits>

namespace sluice {

TEST_CASE("the largest value that holds is found wherever it lies in the range") {
  for (int64_t low = -3; low <= 3; ++low) {
    for (int64_t high = low; high <= low + 9; ++high) {
      for (int64_t last = low; last <= high; ++last) {
        CHECK(LargestThat(low, high, [&](int64_t value) { return value <= last; }) == last);
      }
    }
  }
}

TEST_CASE("the low end is never asked, and is the answer where nothing holds") {
  const auto never = [](int64_t value) {
    CHECK(value > 5);
    return false;
  };
  CHECK(LargestThat(5, 100, never) == 5);
  CHECK(LargestThat(5, 5, never) == 5);
}

TEST_CASE("a range up to the largest int64 does not overflow") {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  CHECK(LargestThat(0, kMost, [](int64_t) { return true; }) == kMost);
}

}  // namespace sluice
