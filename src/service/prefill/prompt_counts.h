// Counts a prefill node's prompts in its metrics, whichever call they come by. Thread-safe.
#pragma once

#include <cstddef>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "src/metrics/metrics.h"

namespace sluice {

class PromptCounts {
 public:
  explicit PromptCounts(const Metrics* metrics) : metrics_(*metrics) {}

  // Called for each prompt in this order: Queued when it waits for a thread; Begun when a thread
  // has it, or Left when none will; Ended when it has ended.
  void Queued();
  void Left();
  void Begun(absl::Time arrived);
  void Ended(const absl::Status& status, size_t tokens, absl::Time arrived);

  struct Now {
    int running = 0;
    int waiting = 0;
  };
  Now now() const;

 private:
  const Metrics& metrics_;
  mutable absl::Mutex mutex_;  // held over SetRunning too, so that its last value is the newest
  Now now_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
