#include "src/device/sim/sim_clock.h"

#include <algorithm>
#include <utility>

#include "src/base/status_macros.h"

namespace sluice {

void SimClock::At(absl::Time when, std::function<void()> what) {
  due_.push({when, next_order_++, std::move(what)});
}

bool SimClock::RunNext() {
  if (due_.empty()) return false;
  // The queue gives only const access; the element that is moved out is popped at once.
  auto next = std::move(const_cast<Happening&>(due_.top()));
  due_.pop();
  now_ = std::max(now_, next.when);
  next.what();
  return true;
}

void SimClock::RunUntil(const std::function<bool()>& done) {
  while (!done()) SLUICE_CHECK(RunNext(), "no event is left that could end the wait");
}

void SimClock::Leap(absl::Duration by) {
  SLUICE_CHECK(by >= absl::ZeroDuration(), "time never goes back");
  now_ += by;
}

}  // namespace sluice
