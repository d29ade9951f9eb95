// Virtual time: a clock, and what is to happen when. Time moves only from one happening to the
// next, so that a simulation of minutes takes milliseconds, and the same again every time.
//
// One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "absl/time/time.h"
#include "src/base/clock.h"

namespace sluice {

class SimClock : public Clock {
 public:
  explicit SimClock(absl::Time start = absl::FromUnixSeconds(1'000'000'000)) : now_(start) {}

  absl::Time Now() const override { return now_; }

  // Runs `what` at `when`, or next if that is past. What is due at one time runs in the order in
  // which it was asked for.
  void At(absl::Time when, std::function<void()> what);
  void After(absl::Duration delay, std::function<void()> what) {
    At(now_ + delay, std::move(what));
  }

  size_t due() const { return due_.size(); }  // happenings to come
  // Moves to the next happening and runs it. False: there is none.
  bool RunNext();
  // Runs until done() holds. REQUIRES: it comes to that.
  void RunUntil(const std::function<bool()>& done);
  // The clock leaps ahead: what was due meanwhile comes late.
  void Leap(absl::Duration by);

 private:
  struct Happening {
    absl::Time when;
    uint64_t order;
    std::function<void()> what;
    bool operator>(const Happening& other) const {
      return when != other.when ? when > other.when : order > other.order;
    }
  };
  absl::Time now_;
  uint64_t next_order_ = 0;
  std::priority_queue<Happening, std::vector<Happening>, std::greater<>> due_;
};

}  // namespace sluice
