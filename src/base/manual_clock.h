// A clock that stands still until it is told to move: tests and the simulation own it.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

#include "absl/time/time.h"
#include "src/base/clock.h"
#include "src/base/status_macros.h"

namespace sluice {

// Thread-safe. It never goes back. It has no lock: it is asked under the locks of others, and a
// debug build's record of lock orders would be one more thing that threads share.
class ManualClock : public Clock {
 public:
  explicit ManualClock(absl::Time start = absl::FromUnixSeconds(1'000'000'000))
      : nanoseconds_(absl::ToUnixNanos(start)) {}

  absl::Time Now() const override {
    return absl::FromUnixNanos(nanoseconds_.load(std::memory_order_acquire));
  }

  // REQUIRES: duration >= 0.
  void Advance(absl::Duration duration) {
    SLUICE_CHECK(duration >= absl::ZeroDuration(), "a clock was asked to go back by ",
                 absl::FormatDuration(-duration));
    constexpr int64_t kEnd =
        std::numeric_limits<int64_t>::max();  // the year 2262; it goes no further
    const int64_t by = absl::ToInt64Nanoseconds(duration);
    int64_t now = nanoseconds_.load(std::memory_order_relaxed);
    while (!nanoseconds_.compare_exchange_weak(now, now > kEnd - by ? kEnd : now + by,
                                               std::memory_order_acq_rel)) {
    }
  }

 private:
  std::atomic<int64_t> nanoseconds_;  // since 1970
};

}  // namespace sluice
