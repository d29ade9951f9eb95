// Taking a node out of service and back: Admin.Drain, Admin.Resume and SIGTERM all come through
// here. The state itself is the engine's and Readiness'; this adds what health checks are told, the
// time that running sequences get, and that a process which stops does not come back. Thread-safe.
#pragma once

#include <functional>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/base/clock.h"
#include "src/base/readiness.h"
#include "src/engine/engine.h"

namespace sluice {

class DrainControl {
 public:
  struct Options {
    absl::Duration timeout = absl::Seconds(30);  // where Drain names none
    Engine* engine = nullptr;
    Readiness* readiness = nullptr;  // the engine's
    Clock* clock = nullptr;
  };
  explicit DrainControl(const Options& options) : options_(options) {}

  // The node is ready; `set_serving` tells health checks, from now on.
  void Open(std::function<void(bool)> set_serving);

  struct Drained {
    bool was_draining = false;
    absl::Duration timeout;  // left for what runs
  };
  // Takes nothing new; what is alive gets `timeout`, then ends with UNAVAILABLE, reason DRAINING.
  // Again while draining the time counts anew. After Stop it changes nothing.
  Drained Drain(std::optional<absl::Duration> timeout);
  // Takes work again, also in the middle of a drain. Returns whether it was draining.
  //   FAILED_PRECONDITION  reason STOPPING: after Stop
  absl::StatusOr<bool> Resume();
  // SIGTERM: as Drain, with the configured time, and for good. `idle` runs on the engine's thread
  // once nothing is alive.
  void Stop(std::function<void()> idle);

 private:
  void Begin(absl::Duration timeout, std::function<void()> idle)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  absl::Mutex mutex_;
  std::function<void(bool)> set_serving_ ABSL_GUARDED_BY(mutex_);  // null until Open
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time deadline_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
