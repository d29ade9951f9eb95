// Formats the results of `sluice-bench policies` as lines and JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/bench/harness/policy_run.h"
#include "src/bench/policies/workload_statistics.h"
#include "src/bench/report/report.h"

namespace sluice::bench {

std::string RunHeader();
std::string RunLine(const PolicyRun& run);
std::string NoRoomLine(const std::string& policy, int context, int batch, int largest);
Figure RunFigure(const PolicyRun& run);
// Layers that select nothing have zeros.
nlohmann::json RunJson(const PolicyRun& run);

// Returns the rates from which floors are computed; `workers` threads read DRAM.
std::string RatesText(const MemoryTraffic& rates, int workers);
nlohmann::json ToJson(const MemoryTraffic& traffic);
std::string FloorHeader();
// Returns lines with policy scout's tokens/s over each other policy's, each at its largest batch
// and at equal batches; empty without scout.
std::string ScoutRatios(const std::vector<PolicyRun>& runs);
// Reports, by layer, the share of a row's selection that the row before had selected.
std::string SelectionOverlapText(const std::vector<double>& layers, int context);
// Reports how many entries a sequence misses in a step under policies that fetch latent entries;
// empty without such a policy.
std::string MissesText(const std::vector<PolicyRun>& runs);
// `full` is the run of policy full at its largest batch, with which the others are compared; null
// if there is none.
std::string FloorLine(const PolicyRun& run, const MemoryTraffic& rates, const PolicyRun* full);
nlohmann::json FloorJson(const PolicyRun& run, const MemoryTraffic& rates, const PolicyRun* full);

// `shares` is the result of MeasureShares.
std::string StatisticsText(const WorkloadStatistics& statistics,
                           const std::vector<std::vector<double>>& shares, int context);
nlohmann::json StatisticsJson(const WorkloadStatistics& statistics,
                              const std::vector<std::vector<double>>& shares, int context);

}  // namespace sluice::bench
