// The engine's inbox: closures from any thread, run on the engine's thread in order.
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
  // Ends a Wait without anything to run.
  void Wake() {
    absl::MutexLock lock(&mutex_);
    woken_ = true;
    SignalLocked();
  }
  // Runs what is there.
  void Drain() {
    {
      absl::MutexLock lock(&mutex_);
      running_.swap(work_);
      woken_ = false;
    }
    for (const std::function<void()>& work : running_) work();
    running_.clear();
  }
  // Whether there is something: at once, or after `timeout` at most (none: it only looks) and never
  // more than kLookAgain: a wake-up that got lost, or a clock that leapt, makes the engine late by
  // that much, and hangs nobody.
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
  std::vector<std::function<void()>> running_;  // engine's thread; keeps its memory
};

}  // namespace sluice
