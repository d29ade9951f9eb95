// Time as the engine, the leases and the tests see it. Injected, so that a simulation owns it.
#pragma once

#include "absl/time/time.h"

namespace sluice {

class Clock {
 public:
  virtual ~Clock() = default;
  // Monotonic enough for deadlines; thread-safe.
  virtual absl::Time Now() const = 0;
};

// The system's clock; lives for ever.
Clock* RealClock();

}  // namespace sluice
