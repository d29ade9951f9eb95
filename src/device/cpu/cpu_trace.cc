#include "src/device/cpu/cpu_trace.h"

#include <utility>

namespace sluice {
namespace {

class CpuTrace : public DeviceTrace {
 public:
  explicit CpuTrace(CpuTraceLog* log) : log_(log) {}
  ~CpuTrace() override { log_->Stop(); }
  absl::StatusOr<std::vector<TraceSlice>> Stop() override { return log_->Stop(); }

 private:
  CpuTraceLog* const log_;
};

}  // namespace

void CpuTraceLog::Add(TraceSlice slice) {
  absl::MutexLock lock(&mutex_);
  if (on()) slices_.push_back(std::move(slice));
}

absl::StatusOr<std::unique_ptr<DeviceTrace>> CpuTraceLog::Start() {
  if (on_.exchange(true)) return absl::FailedPreconditionError("the device is traced already");
  return std::make_unique<CpuTrace>(this);
}

std::vector<TraceSlice> CpuTraceLog::Stop() {
  absl::MutexLock lock(&mutex_);
  on_.store(false, std::memory_order_relaxed);
  return std::exchange(slices_, {});
}

}  // namespace sluice
