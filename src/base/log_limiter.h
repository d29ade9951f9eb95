// LogLimiter bounds how often a line is written, for lines that callers can cause. A flood of bad
// requests must not fill a disk, nor slow down the threads that answer them. Thread-safe.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/base/clock.h"

namespace sluice {

class LogLimiter {
 public:
  // Allows `burst` lines at once, and one more every `interval`.
  LogLimiter(const Clock* clock, int burst, absl::Duration interval)
      : clock_(clock), burst_(burst), interval_(interval), lines_(burst), counted_(clock->Now()) {}

  // Returns nothing if the line is to be left out. Otherwise returns how many lines were left out
  // before it.
  std::optional<uint64_t> Admit();

 private:
  const Clock* const clock_;
  const int64_t burst_;
  const absl::Duration interval_;
  absl::Mutex mutex_;
  int64_t lines_ ABSL_GUARDED_BY(mutex_);       // lines that may be written at once
  absl::Time counted_ ABSL_GUARDED_BY(mutex_);  // the time up to which intervals became lines
  uint64_t suppressed_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace sluice
