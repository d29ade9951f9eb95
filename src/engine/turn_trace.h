// Where the engine's thread was, phase by phase, what its steps were, and what became of sequences:
// the host's part of a trace.
#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "src/base/strong_id.h"
#include "src/engine/batch_state.h"
#include "src/request/request.h"

namespace sluice {

// A step whose results were read.
struct TracedStep {
  uint64_t number = 0;
  int32_t rows = 0;       // (sequence, positions) pairs
  int32_t sequences = 0;  // that got a token
  absl::Time begin;       // its launch, or the end of the step before if later
  absl::Time end;         // its results were there
  BatchState::Times device;
};

enum class SequenceStage {
  kTransfer,   // its transfer is not complete
  kQueued,     // ready, no room in the batch yet
  kRunning,    // has a place in the batch
  kPreempted,  // lost it to an older one
  kEnded,
};

// Engine's thread.
class TurnTrace {
 public:
  virtual ~TurnTrace() = default;
  // `name`: plan, launch or emit (StepTimes), "turn" around them, or "wait" between two turns; a
  // literal. A turn comes after what was inside it, and after the wait before it.
  virtual void Phase(const char* name, absl::Time begin, absl::Time end) = 0;
  virtual void Step(const TracedStep& step) = 0;
  // Each sequence enters kTransfer or kQueued first, and kEnded once.
  virtual void Enter(SequenceId id, const Request& request, SequenceStage stage, absl::Time at) = 0;
};

}  // namespace sluice
