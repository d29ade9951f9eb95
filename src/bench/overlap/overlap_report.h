// Lines and JSON of what transfers cost a step (overlap_run.h).
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "src/bench/overlap/overlap_run.h"

namespace sluice::bench {

std::string OverlapHeader();
// A line for each number of misses.
std::string OverlapLines(const OverlapRun& run);
nlohmann::json OverlapJson(const OverlapRun& run);

}  // namespace sluice::bench
