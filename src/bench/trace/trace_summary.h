// What a trace of steps comes to, in a few figures.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/bench/harness/step_trace.h"

namespace sluice::bench {

// Between two slices of one stream, while the stream ran nothing.
struct TraceGap {
  uint32_t stream = 0;
  absl::Time begin, end;
  std::string after, before;  // what ran last, and what ran next
  // Both belong to one step: they were launched as one, or both are kernels launched one by one.
  // Else what lies between is another step's beginning, or a copy's launch.
  bool inside_step = false;
};

// Gaps of the streams that ran kernels, in order. `device` as StepTrace has it.
std::vector<TraceGap> FindGaps(const std::vector<TraceSlice>& device);

// A trace's summary; times in seconds a step unless they say otherwise.
struct TraceSummary {
  double step = 0;     // the stretch over its steps
  double kernels = 0;  // while at least one kernel ran, streams that compute together
  double copies = 0;   // copies and fills, each by itself: they may run beside kernels
  double gaps_inside = 0, gaps_between = 0;
  double largest_gap_inside = 0;  // of all steps
  std::string largest_gap_after, largest_gap_before;
  int64_t gaps_over_5_us = 0;  // inside steps, of all of them
  double plan = 0, launch = 0, emit = 0, wait = 0;
  struct Kernel {
    std::string name;
    double calls = 0;  // a step
    // While it was the one to wait for: from the end of what its stream began before it, or its own
    // begin if later. A kernel that starts early and waits for the one before it is not counted
    // twice; these add up to what the streams were busy with kernels.
    double seconds = 0;
    double begin_to_end = 0;  // all of it
  };
  std::vector<Kernel> kernel_times;  // by seconds, the longest first
};
TraceSummary Summarize(const StepTrace& trace);

// A table for people.
std::string ToText(const StepTrace& trace, const TraceSummary& summary);
nlohmann::json ToJson(const StepTrace& trace, const TraceSummary& summary);

}  // namespace sluice::bench
