// Whether a device still works. Its streams, events and operators report failures; the first report
// stays.
#pragma once

#include <atomic>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace sluice {

// Any thread may call these functions.
class DeviceHealth {
 public:
  // Makes status() INTERNAL with reason GPU_FAILED, "the GPU failed: <why>", from now on. The first
  // failure is logged.
  void Fail(const std::string& why);
  // Makes status() `why`, which is not OK, from now on: the device is well, and cannot go on.
  void FailWith(const absl::Status& why);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // Returns OK, or the first failure. Cheap while OK.
  absl::Status status() const;

 private:
  std::atomic<bool> failed_{false};
  mutable absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
