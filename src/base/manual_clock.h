// A clock that stands still until it is told to move: tests and the simulation own it.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/base/clock.h"
#include "src/base/status_macros.h"

namespace sluice {

// Thread-safe. It never goes back.
class ManualClock : public Clock {
 public:
  explicit ManualClock(absl::Time start = absl::FromUnixSeconds(1'000'000'000)) : now_(start) {}

  absl::Time Now() const override {
    absl::MutexLock lock(&mutex_);
    return now_;
  }

  // REQUIRES: duration >= 0.
  void Advance(absl::Duration duration) {
    SLUICE_CHECK(duration >= absl::ZeroDuration(), "a clock was asked to go back by ",
                 absl::FormatDuration(-duration));
    absl::MutexLock lock(&mutex_);
    now_ += duration;
  }

 private:
  mutable absl::Mutex mutex_;
  absl::Time now_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
