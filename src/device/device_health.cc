#include "src/device/device_health.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"

namespace sluice {

void DeviceHealth::Fail(const std::string& why) {
  FailWith(
      WithReason(absl::InternalError(absl::StrCat("the GPU failed: ", why)), reasons::kGpuFailed));
}

void DeviceHealth::FailWith(const absl::Status& why) {
  {
    absl::MutexLock lock(&mutex_);
    if (!status_.ok()) return;
    status_ = why;
  }
  failed_.store(true, std::memory_order_release);
  Log(LogLevel::kError, "the device failed", {{"error", std::string(why.message())}});
}

void DeviceHealth::SetStall(absl::Duration limit, absl::Status why) {
  absl::MutexLock lock(&mutex_);
  stall_ = std::move(why);
  stall_ns_.store(absl::ToInt64Nanoseconds(limit), std::memory_order_relaxed);
}

void DeviceHealth::FailStalled() {
  absl::Status why;
  {
    absl::MutexLock lock(&mutex_);
    why = stall_;
  }
  if (!why.ok()) return FailWith(why);
  Fail(absl::StrCat("no progress for ", absl::ToInt64Seconds(stall_limit()), " seconds"));
}

absl::Status DeviceHealth::status() const {
  if (!failed()) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  return status_;
}

}  // namespace sluice
