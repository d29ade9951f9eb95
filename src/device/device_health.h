// Whether a device still works. Its streams, events and operators report failures; the first report
// stays.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace sluice {

// Any thread may call these functions.
class DeviceHealth {
 public:
  // Makes status() INTERNAL with reason GPU_FAILED, "the GPU failed: <why>", from now on. The first
  // failure is logged.
  void Fail(const std::string& why);
  // Makes status() `why`, which is not OK, from now on: the device is well, and cannot go on.
  void FailWith(const absl::Status& why);
  // Says after how long without progress the device has failed, and with what status.
  void SetStall(absl::Duration limit, absl::Status why);
  absl::Duration stall_limit() const {
    return absl::Nanoseconds(stall_ns_.load(std::memory_order_relaxed));
  }
  // Fails the device because there was no progress for stall_limit().
  void FailStalled();
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // Returns OK, or the first failure. Cheap while OK.
  absl::Status status() const;

 private:
  std::atomic<bool> failed_{false};
  // A GPU that has not reached an event after this time hangs: no step takes a tenth of it.
  std::atomic<int64_t> stall_ns_{absl::ToInt64Nanoseconds(absl::Seconds(120))};
  mutable absl::Mutex mutex_;
  absl::Status stall_ ABSL_GUARDED_BY(mutex_);  // OK: it is the GPU's own failure
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
