#include "src/request/finish_rate.h"

#include <catch2/catch.hpp>

#include "src/base/manual_clock.h"

namespace sluice {
namespace {

TEST_CASE("a refused caller is told the mean time between ends, within bounds") {
  ManualClock clock;
  FinishRate rate(&clock);
  CHECK(rate.RetryAfter() == FinishRate::kDefault);
  rate.Finished();
  CHECK(rate.RetryAfter() == FinishRate::kDefault);
  for (int i = 0; i < 10; ++i) {
    clock.Advance(absl::Seconds(3));
    rate.Finished();
  }
  CHECK(rate.RetryAfter() == absl::Seconds(3));
  // While nothing ends the estimate grows, up to its bound.
  clock.Advance(absl::Seconds(30));
  CHECK(rate.RetryAfter() == absl::Seconds(6));
  clock.Advance(absl::Hours(1));
  CHECK(rate.RetryAfter() == FinishRate::kMost);
  // Old ends are forgotten.
  for (int i = 0; i < 100; ++i) {
    clock.Advance(absl::Milliseconds(500));
    rate.Finished();
  }
  CHECK(rate.RetryAfter() == absl::Milliseconds(500));
  for (int i = 0; i < 100; ++i) rate.Finished();
  CHECK(rate.RetryAfter() == FinishRate::kLeast);
}

TEST_CASE("a single end long ago says that the next may take as long") {
  ManualClock clock;
  FinishRate rate(&clock);
  rate.Finished();
  clock.Advance(absl::Seconds(8));
  CHECK(rate.RetryAfter() == absl::Seconds(8));
}

}  // namespace
}  // namespace sluice
