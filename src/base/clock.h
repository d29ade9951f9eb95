// Clock is the time that the engine, the leases and the tests see. It is injected, so that a
// simulation can own it.
#pragma once

#include "absl/time/time.h"

namespace sluice {

class Clock {
 public:
  virtual ~Clock() = default;
  // Returns a time that is monotonic enough for deadlines. Thread-safe.
  virtual absl::Time Now() const = 0;
};

// Returns the system's clock, which lives for ever.
Clock* RealClock();

}  // namespace sluice
