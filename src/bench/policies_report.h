// Lines and JSON of `sluice-bench policies`.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/bench/policy_quality.h"
#include "src/bench/policy_run.h"
#include "src/bench/report.h"
#include "src/bench/workload_statistics.h"

namespace sluice {

std::string RunHeader();
// `largest`: the batch is the largest that the policy admits.
std::string RunLine(const PolicyRun& run, bool largest);
std::string NoRoomLine(const std::string& policy, int context, int batch, int largest);
Figure RunFigure(const PolicyRun& run);
// Layers that select nothing have zeros.
nlohmann::json RunJson(const PolicyRun& run, bool largest);

// `shares`: MeasureShares.
std::string StatisticsText(const WorkloadStatistics& statistics,
                           const std::vector<std::vector<double>>& shares, int context);
nlohmann::json StatisticsJson(const WorkloadStatistics& statistics,
                              const std::vector<std::vector<double>>& shares, int context);

std::string QualityHeader();
std::string QualityLine(const PolicyQuality& quality, int context);
Figure QualityFigure(const PolicyQuality& quality, int context);
nlohmann::json QualityJson(const PolicyQuality& quality, int context);

}  // namespace sluice
