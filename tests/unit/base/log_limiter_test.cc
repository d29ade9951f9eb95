#include "src/base/log_limiter.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <thread>
#include <vector>

#include "src/base/manual_clock.h"

namespace sluice {
namespace {

// Returns the lines admitted out of `tries`. Adds the numbers that they reported to *suppressed.
int Admitted(LogLimiter& limiter, int tries, uint64_t* suppressed) {
  int lines = 0;
  for (int i = 0; i < tries; ++i) {
    if (const auto left_out = limiter.Admit()) {
      ++lines;
      *suppressed += *left_out;
    }
  }
  return lines;
}

TEST_CASE("a flood gets its burst and then a line per interval, which counts what was left out") {
  ManualClock clock;
  LogLimiter limiter(&clock, 3, absl::Seconds(1));
  uint64_t suppressed = 0;
  CHECK(Admitted(limiter, 1000, &suppressed) == 3);
  CHECK(suppressed == 0);
  clock.Advance(absl::Milliseconds(999));
  CHECK(Admitted(limiter, 10, &suppressed) == 0);
  clock.Advance(absl::Milliseconds(1));
  CHECK(Admitted(limiter, 10, &suppressed) == 1);
  CHECK(suppressed == 997 + 10);
  // A part of an interval is not lost: 2.5 and 0.5 seconds make three lines.
  clock.Advance(absl::Milliseconds(2500));
  CHECK(Admitted(limiter, 10, &suppressed) == 2);
  clock.Advance(absl::Milliseconds(500));
  CHECK(Admitted(limiter, 10, &suppressed) == 1);
}

TEST_CASE("quiet gives back the burst and no more") {
  ManualClock clock;
  LogLimiter limiter(&clock, 3, absl::Seconds(1));
  uint64_t suppressed = 0;
  Admitted(limiter, 5, &suppressed);
  clock.Advance(absl::Hours(24 * 365 * 400));
  CHECK(Admitted(limiter, 10, &suppressed) == 3);
  CHECK(suppressed == 2);
}

TEST_CASE("threads share one bound") {
  ManualClock clock;
  LogLimiter limiter(&clock, 7, absl::Seconds(1));
  std::atomic<int> lines = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) lines += limiter.Admit().has_value() ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(lines == 7);
  clock.Advance(absl::Seconds(1));
  CHECK(limiter.Admit() == 4000u - 7);
}

}  // namespace
}  // namespace sluice
