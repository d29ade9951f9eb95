// A few layers of a step, slice by slice, from a trace: what ran beside what.
#pragma once

#include <nlohmann/json.hpp>

#include "src/bench/harness/step_trace.h"

namespace sluice::bench {

// {"anchor": the kernel that every layer begins with here, one a layer; "layer_seconds": {median,
// p10, p90} from one to the next; "slices": of three layers that took as long as most [{stream,
// name, kind, begin, end}], seconds from the first one's begin}. Null where no kernel runs once a
// layer.
nlohmann::json LayerTimeline(const StepTrace& trace, int layers);

}  // namespace sluice::bench
