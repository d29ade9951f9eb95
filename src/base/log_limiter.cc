#include "src/base/log_limiter.h"

#include <algorithm>
#include <utility>

namespace sluice {

std::optional<uint64_t> LogLimiter::Admit() {
  const absl::Time now = clock_->Now();
  absl::MutexLock lock(&mutex_);
  absl::Duration rest;
  const int64_t earned = absl::IDivDuration(now - counted_, interval_, &rest);
  if (earned > 0) {
    // This holds after any length of time: IDivDuration saturates, and burst_ bounds the result.
    lines_ = std::min(burst_, lines_ + std::min(earned, burst_));
    counted_ = now - rest;
  }
  if (lines_ == 0) {
    ++suppressed_;
    return std::nullopt;
  }
  --lines_;
  return std::exchange(suppressed_, 0);
}

}  // namespace sluice
