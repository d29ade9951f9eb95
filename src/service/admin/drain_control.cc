#include "src/service/admin/drain_control.h"

#include <algorithm>
#include <utility>

#include "src/base/error.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"

namespace sluice {

void DrainControl::Open(std::function<void(bool)> set_serving) {
  absl::MutexLock lock(&mutex_);
  set_serving_ = std::move(set_serving);
  options_.readiness->SetReady();
  set_serving_(options_.readiness->ready());
}

void DrainControl::Begin(absl::Duration timeout, std::function<void()> idle) {
  deadline_ = options_.clock->Now() + timeout;
  options_.engine->Drain(
      deadline_,
      WithReason(
          absl::UnavailableError("the node was drained before the sequence ended: use another one"),
          reasons::kDraining),
      std::move(idle));
  if (set_serving_ != nullptr) set_serving_(false);
}

DrainControl::Drained DrainControl::Drain(std::optional<absl::Duration> timeout) {
  absl::MutexLock lock(&mutex_);
  Drained drained;
  drained.was_draining = options_.readiness->draining();
  if (!stopping_) {
    const absl::Duration given = timeout.value_or(options_.timeout);
    Begin(given, nullptr);
    Log(LogLevel::kInfo, "draining", {{"timeout_seconds", absl::ToDoubleSeconds(given)}});
  }
  drained.timeout = std::max(deadline_ - options_.clock->Now(), absl::ZeroDuration());
  return drained;
}

absl::StatusOr<bool> DrainControl::Resume() {
  absl::MutexLock lock(&mutex_);
  if (stopping_) {
    return WithReason(
        absl::FailedPreconditionError("the process is stopping: start it again instead"),
        reasons::kStopping);
  }
  if (!options_.readiness->draining()) return false;
  options_.engine->Resume();
  if (set_serving_ != nullptr) set_serving_(options_.readiness->ready());
  Log(LogLevel::kInfo, "taking work again");
  return true;
}

void DrainControl::Stop(std::function<void()> idle) {
  absl::MutexLock lock(&mutex_);
  stopping_ = true;
  Begin(options_.timeout, std::move(idle));
}

}  // namespace sluice
