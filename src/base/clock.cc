#include "src/base/clock.h"

#include <atomic>
#include <chrono>
#include <cstdint>

#include "absl/time/clock.h"
#include "src/base/failpoint.h"

namespace sluice {
namespace {

// The wall time at the first use, plus the steady clock since then. A leap of the wall clock
// therefore moves no deadline.
class SteadyClock : public Clock {
 public:
  absl::Time Now() const override {
    const absl::Time now =
        wall_origin_ + absl::FromChrono(std::chrono::steady_clock::now() - steady_origin_);
    if constexpr (kFailpointsCompiledIn) {
      if (SLUICE_FAILPOINT(kClockJump)) {
        leaps_ns_ += absl::ToInt64Nanoseconds(StateOf(Failpoint::kClockJump).term.argument);
      }
      return now + absl::Nanoseconds(leaps_ns_.load(std::memory_order_relaxed));
    }
    return now;
  }

 private:
  const absl::Time wall_origin_ = absl::Now();
  const std::chrono::steady_clock::time_point steady_origin_ = std::chrono::steady_clock::now();
  mutable std::atomic<int64_t> leaps_ns_{0};  // sum of the leaps that the failpoint made
};

}  // namespace

Clock* RealClock() {
  static SteadyClock* clock = new SteadyClock;
  return clock;
}

}  // namespace sluice
