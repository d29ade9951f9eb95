#include "src/device/device_health.h"

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"

namespace sluice {

void DeviceHealth::Fail(const std::string& why) {
  {
    absl::MutexLock lock(&mutex_);
    if (!status_.ok()) return;
    status_ =
        WithReason(absl::InternalError(absl::StrCat("the GPU failed: ", why)), reasons::kGpuFailed);
  }
  failed_.store(true, std::memory_order_release);
  Log(LogLevel::kError, "the GPU failed", {{"error", why}});
}

absl::Status DeviceHealth::status() const {
  if (!failed()) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  return status_;
}

}  // namespace sluice
