// A stretch of the engine's steps seen from both sides: what ran on the device's streams, and what
// the engine's thread did meanwhile.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/bench/harness/engine_run.h"
#include "src/device/trace.h"

namespace sluice::bench {

struct HostPhase {
  std::string name;  // as TurnTrace has them
  absl::Time begin, end;
};

struct StepTrace {
  std::string name;  // "batch 8, context 512"
  int steps = 0;
  absl::Time begin, end;           // of the stretch; every slice begins inside it
  std::vector<TraceSlice> device;  // by stream, then by begin
  std::vector<HostPhase> host;     // by begin
  std::vector<EngineWindow> windows;
};

// Runs the engine (RunEngine's arguments) and notes the steps of its windows. The run is slower
// than an unobserved one: its times explain, and are no figures.
absl::StatusOr<StepTrace> TraceSteps(EngineRunOptions options, int slots, Device* device,
                                     Model* model, PagePool* hbm, AttentionPolicy* policy);

}  // namespace sluice::bench
