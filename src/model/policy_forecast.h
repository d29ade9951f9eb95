// Forecasts the time of a decode step under a policy that has not run here: from the bytes that the
// step is expected to move (step_traffic.h), the measured rates of the memories, and what a step
// costs beside its bytes. It is arithmetic and yields a forecast, not a figure. Pure functions.
#pragma once

#include <string>

#include "src/attention/policy_options.h"
#include "src/attention/policy_statistics.h"
#include "src/device/memory_rates.h"
#include "src/kv/cache_layout.h"

namespace sluice {

// Returns what a decode row of a sequence of `tokens` tokens is expected to select and to miss in
// HBM, in every layer; empty for policy full. A profile that `options` has from sluice-profile says
// how often scout recalls and what ess misses. Without one the shares are those that were measured
// with the topic-drift workload (src/attention/policies/speed.md). A sequence that fits its
// budget misses nothing.
PolicyStatistics ExpectedStatistics(const PolicyOptions& options, const CacheLayout& layout,
                                    double tokens);

struct StepForecast {
  double seconds = 0;
  std::string bound;  // the memory that sets most of it: "HBM", "link" or "DRAM"
};
// Forecasts a step of `bytes` bytes of a model with `layers` layers under the policy of that name.
StepForecast ForecastStep(const std::string& policy, const MemoryTraffic& bytes, int layers,
                          const DeviceRates& rates);

}  // namespace sluice
