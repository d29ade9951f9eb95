// Forecasts a policy's throughput with other memory than this machine has: the number of sequences
// follows from the memory that one takes, and their speed from a line through the measured batches.
// This is arithmetic and yields a forecast, not a figure.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "src/bench/harness/policy_run.h"

namespace sluice::bench {

struct ForecastMemory {
  int64_t hbm_bytes = 0;  // HBM for caches.
  int64_t dram_bytes = 0;
};

struct Forecast {
  std::string policy;
  int context = 0;
  int64_t batch = 0;
  std::string bound;          // The resource that bounds the batch: "HBM" or "DRAM".
  std::vector<int> measured;  // The measured batches that the line goes through.
  // Null: larger batches took no longer, so the line has no usable slope (runs of a few noisy
  // steps).
  std::optional<double> step_seconds;
  std::optional<double> tokens_per_second() const {
    if (!step_seconds.has_value()) return std::nullopt;
    return static_cast<double>(batch) / *step_seconds;
  }
};

// Returns a forecast for each policy that was measured at two batches or more. REQUIRES: all `runs`
// have one context length.
std::vector<Forecast> ForecastsOf(const std::vector<PolicyRun>& runs, const ForecastMemory& memory);

// Returns one line per forecast, compared with full if full was measured; empty without forecasts.
std::string ForecastText(const std::vector<Forecast>& forecasts, const ForecastMemory& memory);
nlohmann::json ForecastJson(const Forecast& forecast, const ForecastMemory& memory);

}  // namespace sluice::bench
