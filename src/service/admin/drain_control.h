// Takes a node out of service and back. Admin.Drain, Admin.Resume and SIGTERM all come through
// here. The state itself belongs to the engine and to Readiness. This class adds the answer to
// health checks, the time that running sequences get, and the rule that a process which stops does
// not come back. Thread-safe.
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
    absl::Duration timeout = absl::Seconds(30);  // if Drain names none
    Engine* engine = nullptr;
    Readiness* readiness = nullptr;  // the engine's
    Clock* clock = nullptr;
  };
  explicit DrainControl(const Options& options) : options_(options) {}

  // Says that the node is ready. From now on `set_serving` sets the answer to health checks.
  void Open(std::function<void(bool)> set_serving);

  // Returns whether the node takes work.
  bool ready() const { return options_.readiness->ready(); }

  struct Drained {
    bool was_draining = false;
    absl::Duration timeout;  // left for live sequences
  };
  // Makes the node take nothing new. Live sequences get `timeout` and then end with UNAVAILABLE,
  // reason DRAINING. Calling it while draining starts the time anew. After Stop it changes nothing.
  Drained Drain(std::optional<absl::Duration> timeout);
  // Makes the node take work again, also in the middle of a drain. Returns whether it was draining.
  //   FAILED_PRECONDITION  Stop was called (reason STOPPING)
  absl::StatusOr<bool> Resume();
  // Drains as Drain does, with the configured time and for good; SIGTERM calls it. `idle` runs on
  // the engine's thread once nothing is alive.
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
