#include "src/request/finish_rate.h"

#include <algorithm>

namespace sluice {

void FinishRate::Finished() {
  const absl::Time now = clock_->Now();
  absl::MutexLock lock(&mutex_);
  ends_[count_ % kRemembered] = now;
  ++count_;
}

absl::Duration FinishRate::RetryAfter() const {
  const absl::Time now = clock_->Now();
  absl::MutexLock lock(&mutex_);
  if (count_ == 0) return kDefault;
  const size_t known = std::min(count_, kRemembered);
  const absl::Duration since = now - ends_[(count_ - known) % kRemembered];
  if (known == 1) return std::clamp(since, kDefault, kMost);
  return std::clamp(since / static_cast<int64_t>(known - 1), kLeast, kMost);
}

}  // namespace sluice
