// Shows a few layers of a step slice by slice, from a trace: which work ran beside which.
#pragma once

#include <nlohmann/json.hpp>

#include "src/bench/harness/step_trace.h"

namespace sluice::bench {

// Returns {"anchor": the kernel with which every layer begins here, one per layer; "layer_seconds":
// {median, p10, p90} from one to the next; "slices": [{stream, name, kind, begin, end}] of three
// layers of median length, in seconds from the first one's begin}. Returns null if no kernel runs
// once per layer.
nlohmann::json LayerTimeline(const StepTrace& trace, int layers);

}  // namespace sluice::bench
