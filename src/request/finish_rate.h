// Estimates from how often sequences end here how soon a refused caller may find room.
#pragma once

#include <array>
#include <cstddef>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/base/clock.h"

namespace sluice {

// Thread-safe.
class FinishRate {
 public:
  // The estimate while fewer than two sequences have ended, and the bounds of every estimate.
  static constexpr absl::Duration kDefault = absl::Seconds(1);
  static constexpr absl::Duration kLeast = absl::Milliseconds(100);
  static constexpr absl::Duration kMost = absl::Seconds(30);

  explicit FinishRate(Clock* clock) : clock_(clock) {}

  // Notes that a sequence has ended and freed its room.
  void Finished();
  // Returns the mean time between the last kRemembered ends. It grows while nothing ends.
  absl::Duration RetryAfter() const;

 private:
  static constexpr size_t kRemembered = 32;

  Clock* const clock_;
  mutable absl::Mutex mutex_;
  std::array<absl::Time, kRemembered> ends_ ABSL_GUARDED_BY(mutex_);  // a ring
  size_t count_ ABSL_GUARDED_BY(mutex_) = 0;                          // all ends so far
};

}  // namespace sluice
