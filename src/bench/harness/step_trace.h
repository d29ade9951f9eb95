// A stretch of the engine's steps seen from both sides: the work on the device's streams, and what
// the engine's thread did meanwhile.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/bench/harness/engine_run.h"
#include "src/device/trace.h"

namespace sluice::bench {

struct HostPhase {
  std::string name;  // A phase's name in TurnTrace.
  absl::Time begin, end;
};

struct StepTrace {
  std::string name;  // "batch 8, context 512"
  int steps = 0;
  absl::Time begin, end;           // The stretch; every slice begins inside it.
  std::vector<TraceSlice> device;  // By stream, then by begin.
  std::vector<HostPhase> host;     // By begin.
  std::vector<EngineWindow> windows;
};

// Runs the engine (with RunEngine's arguments) and records the steps of its windows. The run is
// slower than an unobserved one: its times explain a step and are not figures.
absl::StatusOr<StepTrace> TraceSteps(EngineRunOptions options, int slots, Device* device,
                                     Model* model, PagePool* hbm, AttentionPolicy* policy);

}  // namespace sluice::bench
