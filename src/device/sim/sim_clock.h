// Virtual time: a clock and a queue of events to come. Time moves only from one event to the next,
// so that a simulation of minutes takes milliseconds, and is the same every time.
//
// Not thread-safe: one thread uses it.
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

  // Runs `what` at `when`, or next if that is past. Events that are due at one time run in the
  // order in which they were asked for.
  void At(absl::Time when, std::function<void()> what);
  void After(absl::Duration delay, std::function<void()> what) {
    At(now_ + delay, std::move(what));
  }

  size_t due() const { return due_.size(); }  // number of events to come
  // Moves to the next event and runs it. Returns false if there is none.
  bool RunNext();
  // Runs until done() holds. REQUIRES: it comes to that.
  void RunUntil(const std::function<bool()>& done);
  // Makes the clock leap ahead: events that were due meanwhile come late.
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
