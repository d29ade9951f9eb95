// Writes traces of steps as a file that chrome://tracing and ui.perfetto.dev open.
//
// Each StepTrace is a process (src/base/trace_events.h). Its threads are the engine's thread, the
// streams, and the gaps of the streams that compute.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/bench/harness/step_trace.h"

namespace sluice::bench {

// Slices of one thread nest or follow each other: where kernels of a stream overlap, the later one
// is put on a second thread of the stream.
nlohmann::json ChromeTrace(const std::vector<StepTrace>& traces);

// UNAVAILABLE if the file cannot be written.
absl::Status WriteChromeTrace(const std::vector<StepTrace>& traces, const std::string& path);

}  // namespace sluice::bench
