// The host's part of a trace: the phases of the engine's thread, its steps, and the stages of
// sequences.
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
  int32_t sequences = 0;  // sequences that got a token
  absl::Time begin;       // its launch, or the end of the step before, if that is later
  absl::Time end;         // when its results were there
  BatchState::Times device;
};

enum class SequenceStage {
  kTransfer,   // its transfer is not complete
  kQueued,     // ready, no capacity in the batch yet
  kRunning,    // has a slot in the batch
  kPreempted,  // lost its slot to an older sequence
  kEnded,
};

// Receives what the engine did. Only the engine's thread calls it.
class TurnTrace {
 public:
  virtual ~TurnTrace() = default;
  // Reports a phase. `name` is a literal: plan, launch or emit (StepTimes), "turn" around them, or
  // "wait" between two turns. A turn comes after the phases inside it, and after the wait before
  // it.
  virtual void Phase(const char* name, absl::Time begin, absl::Time end) = 0;
  virtual void Step(const TracedStep& step) = 0;
  // Reports that a sequence enters a stage. Each sequence enters kTransfer or kQueued first, and
  // kEnded once.
  virtual void Enter(SequenceId id, const Request& request, SequenceStage stage, absl::Time at) = 0;
};

}  // namespace sluice
