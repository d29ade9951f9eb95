// Where the engine's thread was, phase by phase: the host's part of a step's trace.
#pragma once

#include "absl/time/time.h"

namespace sluice {

class TurnTrace {
 public:
  virtual ~TurnTrace() = default;
  // `name`: plan, launch or emit (StepTimes), "turn" around them, or "wait" between two turns; a
  // literal. Engine's thread.
  virtual void Phase(const char* name, absl::Time begin, absl::Time end) = 0;
};

}  // namespace sluice
