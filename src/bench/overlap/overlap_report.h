// Formats the cost of transfers in a step (overlap_run.h) as lines and JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "src/bench/overlap/overlap_run.h"

namespace sluice::bench {

std::string OverlapHeader();
// Returns one line for each number of misses.
std::string OverlapLines(const OverlapRun& run);
nlohmann::json OverlapJson(const OverlapRun& run);

}  // namespace sluice::bench
