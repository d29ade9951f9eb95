// Readiness says whether this node takes work. Each node has one, and every service reads it. The
// main program of a prefill node sets it. In a decode node the engine sets it, and refuses work by
// it too. Thread-safe.
#pragma once

#include <atomic>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "src/base/error.h"
#include "src/base/reasons.h"

namespace sluice {

class Readiness {
 public:
  // A canary has succeeded.
  void SetReady() { ready_.store(true); }
  // While draining, the node finishes its running work and takes no new work.
  void SetDraining(bool draining) { draining_.store(draining); }
  // The node can never work again. The first reason stays.
  void SetFailed(const absl::Status& why) {
    absl::MutexLock lock(&mutex_);
    if (failure_.ok()) failure_ = why;
    failed_.store(true);
  }

  bool ready() const { return ready_.load() && !draining() && !failed_.load(); }
  bool draining() const { return draining_.load(); }

  // Returns OK, or what keeps the node from taking work: its failure, or UNAVAILABLE with reason
  // DRAINING.
  absl::Status CheckTakesWork() const {
    if (failed_.load()) {
      absl::MutexLock lock(&mutex_);
      return failure_;
    }
    if (!draining()) return absl::OkStatus();
    return WithReason(absl::UnavailableError("the node is draining: use another one"),
                      reasons::kDraining);
  }

 private:
  std::atomic<bool> ready_ = false;
  std::atomic<bool> draining_ = false;
  std::atomic<bool> failed_ = false;
  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
