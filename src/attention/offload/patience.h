// The pauses of a worker that waits for others within a round, between two looks.
#pragma once

#include <chrono>
#include <thread>

#include "absl/time/time.h"
#include "src/device/cpu/spin_wait.h"

namespace sluice {

// The worker has a core of its own where there are enough, and lets others have it where nothing
// has come for some time.
class Patience {
 public:
  void Reset() { looks_ = 0; }
  void Pause() {
    constexpr int kLooks = 256;  // some 10 us
    if (++looks_ < kLooks) {
      CpuRelax();
    } else {
      std::this_thread::yield();
    }
  }

 private:
  int looks_ = 0;
};

// Returns until when a worker may wait for others in a round that it takes up now: well within the
// deadline, so that whoever keeps the others waiting misses it alone.
inline std::chrono::steady_clock::time_point PatientUntil(absl::Duration deadline) {
  return std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(deadline / 2);
}

// A worker's waiting for others in a round, which it has just taken up.
class RoundWait {
 public:
  explicit RoundWait(absl::Duration deadline) : until_(PatientUntil(deadline)) {}
  // Waits a little. REQUIRES: End was called before, unless the worker has only waited since.
  void Pause() {
    if (!waits_) since_ = Clock::now();
    waits_ = true;
    patience_.Pause();
  }
  // Says that the worker has something else to do.
  void End() {
    if (waits_) sum_ += absl::FromChrono(Clock::now() - since_);
    waits_ = false;
    patience_.Reset();
  }
  // Returns whether the worker may wait still.
  bool patient() const { return Clock::now() < until_; }
  // Returns how long the worker has waited in all.
  absl::Duration sum() const { return sum_; }

 private:
  using Clock = std::chrono::steady_clock;
  const Clock::time_point until_;
  Clock::time_point since_;
  bool waits_ = false;
  Patience patience_;
  absl::Duration sum_;
};

}  // namespace sluice
