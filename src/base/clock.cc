#include "src/base/clock.h"

#include <chrono>

#include "absl/time/clock.h"

namespace sluice {
namespace {

// Wall time at the first use plus the steady clock since: a leap of the wall clock moves no
// deadline.
class SteadyClock : public Clock {
 public:
  absl::Time Now() const override {
    return wall_origin_ + absl::FromChrono(std::chrono::steady_clock::now() - steady_origin_);
  }

 private:
  const absl::Time wall_origin_ = absl::Now();
  const std::chrono::steady_clock::time_point steady_origin_ = std::chrono::steady_clock::now();
};

}  // namespace

Clock* RealClock() {
  static SteadyClock* clock = new SteadyClock;
  return clock;
}

}  // namespace sluice
