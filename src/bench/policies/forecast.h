// What a policy would come to with other memory than this machine has, or was given: how many
// sequences fit, by what one takes, and how fast they would go, by a line through the batches that
// were measured. Arithmetic alone; a forecast, no figure.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "src/bench/harness/policy_run.h"

namespace sluice::bench {

struct ForecastMemory {
  int64_t hbm_bytes = 0;  // for caches
  int64_t dram_bytes = 0;
};

struct Forecast {
  std::string policy;
  int context = 0;
  int64_t batch = 0;
  std::string bound;          // what ends it: "HBM" or "DRAM"
  std::vector<int> measured;  // batches that the line goes through
  // Null: larger batches took no longer, so that the line leads nowhere (runs of a few noisy
  // steps).
  std::optional<double> step_seconds;
  std::optional<double> tokens_per_second() const {
    if (!step_seconds.has_value()) return std::nullopt;
    return static_cast<double>(batch) / *step_seconds;
  }
};

// Of each policy that was measured at two batches or more; `runs` are of one context.
std::vector<Forecast> ForecastsOf(const std::vector<PolicyRun>& runs, const ForecastMemory& memory);

// A line each, held against full where it is there; empty if there is none.
std::string ForecastText(const std::vector<Forecast>& forecasts, const ForecastMemory& memory);
nlohmann::json ForecastJson(const Forecast& forecast, const ForecastMemory& memory);

}  // namespace sluice::bench
