// Summarizes a trace of steps in a few figures.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/bench/harness/step_trace.h"

namespace sluice::bench {

// A gap between two slices of one stream, in which the stream ran nothing.
struct TraceGap {
  uint32_t stream = 0;
  absl::Time begin, end;
  std::string after, before;  // Names of the slices around it.
  // Both slices belong to one step: they were launched together, or both are kernels launched one
  // by one. Otherwise the gap is the begin of another step or the launch of a copy.
  bool inside_step = false;
};

// Returns the gaps of the streams that ran kernels, in order. `device` is sorted as in StepTrace.
std::vector<TraceGap> FindGaps(const std::vector<TraceSlice>& device);

// A trace's summary. Times are seconds per step unless the comment says otherwise.
struct TraceSummary {
  double step = 0;     // The length of the stretch over its steps.
  double kernels = 0;  // Time with at least one kernel running, over all streams that compute.
  double copies = 0;   // Copies and fills, each by itself: they may run beside kernels.
  double gaps_inside = 0, gaps_between = 0;
  double largest_gap_inside = 0;  // Over all steps.
  std::string largest_gap_after, largest_gap_before;
  int64_t gaps_over_5_us = 0;  // Inside steps, counted over all steps.
  double plan = 0, launch = 0, emit = 0, wait = 0;
  struct Kernel {
    std::string name;
    double calls = 0;  // Calls per step.
    // Time in which the stream waited for this kernel: from the end of the stream's previous slice,
    // or the kernel's own begin if that is later. A kernel that starts early and waits for the one
    // before it is not counted twice; these times add up to the time in which the streams were busy
    // with kernels.
    double seconds = 0;
    double begin_to_end = 0;  // Time from begin to end.
  };
  std::vector<Kernel> kernel_times;  // By seconds, the longest first.
};
TraceSummary Summarize(const StepTrace& trace);

// Returns a table for people.
std::string ToText(const StepTrace& trace, const TraceSummary& summary);
nlohmann::json ToJson(const StepTrace& trace, const TraceSummary& summary);

}  // namespace sluice::bench
