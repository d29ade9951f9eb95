// Takes SIGTERM and SIGINT on a thread of its own. The first signal asks a serving program to
// finish running work, the second asks it to stop at once, and the third ends the process.
#pragma once

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace sluice {

class Signals {
 public:
  // REQUIRES: no other thread was started. Threads inherit the mask that leaves the signals to this
  // one.
  Signals();
  ~Signals();

  // Tells that there may be work to finish from now on. Before, a signal ends the process.
  void Serving();
  // Blocks until the first signal, or until `failed` is true; it is asked every kLook.
  void WaitForStop(const std::function<bool()>& failed);
  static constexpr absl::Duration kLook = absl::Milliseconds(50);
  // Blocks until the second signal, until `done` is true, or for `timeout`; `done` is asked every
  // few milliseconds.
  template <typename Done>
  void WaitForSecond(absl::Duration timeout, const Done& done) {
    const absl::Time end = absl::Now() + timeout;
    while (!done() && Count() < 2 && absl::Now() < end) absl::SleepFor(absl::Milliseconds(5));
  }
  int Count() const;

 private:
  void Loop();
  bool Stopping() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return count_ > 0; }

  mutable absl::Mutex mutex_;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool serving_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace sluice
