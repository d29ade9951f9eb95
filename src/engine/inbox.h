// The engine's inbox: closures that any thread posts and the engine's thread runs, in order.
#pragma once

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/base/failpoint.h"

namespace sluice {

class Inbox {
 public:
  void Post(std::function<void()> work) {
    absl::MutexLock lock(&mutex_);
    work_.push_back(std::move(work));
    SignalLocked();
  }
  // Ends a Wait without posting anything.
  void Wake() {
    absl::MutexLock lock(&mutex_);
    woken_ = true;
    SignalLocked();
  }
  // Runs everything that was posted.
  void Drain() {
    {
      absl::MutexLock lock(&mutex_);
      running_.swap(work_);
      woken_ = false;
    }
    for (const std::function<void()>& work : running_) work();
    running_.clear();
  }
  // Returns whether something was posted: at once, or after `timeout` at most (a zero or negative
  // timeout only polls), and never after more than kLookAgain. A lost wake-up, or a clock that
  // leapt, makes the engine late by that much but never hangs it.
  bool Wait(absl::Duration timeout) {
    absl::MutexLock lock(&mutex_);
    if (!woken_ && work_.empty() && timeout > absl::ZeroDuration()) {
      changed_.WaitWithTimeout(&mutex_, std::min(timeout, kLookAgain));
    }
    return woken_ || !work_.empty();
  }
  static constexpr absl::Duration kLookAgain = absl::Milliseconds(100);

 private:
  void SignalLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!SLUICE_FAILPOINT(kEngineWake)) changed_.Signal();
  }

  absl::Mutex mutex_;
  absl::CondVar changed_;  // not Mutex::Await: ThreadSanitizer cannot see into Debian's Abseil
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::function<void()>> work_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::function<void()>> running_;  // belongs to the engine's thread; keeps its memory
};

}  // namespace sluice
