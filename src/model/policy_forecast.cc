#include "src/model/policy_forecast.h"

#include <algorithm>
#include <cmath>

#include "src/attention/latent/latent_views.h"
#include "src/model/step_traffic.h"

namespace sluice {
namespace {

// Expected statistics are of so many rows, so that the counts, which are whole, keep fractions.
constexpr int64_t kRows = 1000;

// The shares below were measured at 64K tokens (policies/speed.md). Scout's controller keeps the
// CPU's mean share at 0.6 of its limit, recalls a layer every 3.4 steps and then brings as much as
// the limit; a row of recall fetches 3.1 % of what it selects.
constexpr double kScoutOfLimit = 0.6;
constexpr double kScoutInterval = 3.4;
constexpr double kRecallFetched = 0.031;
// HGCA's selection at beta 1 was a tenth of the context, and it shrank as beta to this power.
constexpr double kHgcaSelected = 0.1;
constexpr double kHgcaPower = -0.66;
// Entries that a row of ess misses, of those that it selects, where no profile says it.
constexpr double kEssMissed = 0.05;

struct Row {
  double selected = 0, missing = 0, recalled = 0;  // tokens of one KV head
};

Row RowOfScout(const PolicyOptions& o, size_t layer, double tokens) {
  Row row;
  row.selected = std::min<double>(o.budget_tokens, tokens);
  if (row.selected >= tokens) return row;
  const double limit = row.selected * o.scout.share_limit;
  const double interval =
      layer < o.scout.intervals.size() ? std::max(o.scout.intervals[layer], 1) : kScoutInterval;
  row.missing = kScoutOfLimit * limit;
  row.recalled = limit / interval;
  return row;
}

Row RowOfRecall(const PolicyOptions& o, double tokens) {
  Row row;
  row.selected = std::min<double>(o.budget_tokens, tokens);
  if (row.selected < tokens) row.missing = row.recalled = kRecallFetched * row.selected;
  return row;
}

Row RowOfHgca(const PolicyOptions& o, double tokens) {
  const double window = std::min<double>(o.hgca.window_tokens, tokens);
  const double share =
      o.hgca.beta > 0 ? std::min(kHgcaSelected * std::pow(o.hgca.beta, kHgcaPower), 1.0) : 1.0;
  Row row;
  row.missing = share * (tokens - window);
  row.selected = window + row.missing;
  return row;
}

Row RowOfEss(const PolicyOptions& o, size_t layer, double tokens) {
  Row row;
  row.selected = std::min<double>(o.index_top_k, tokens);
  row.missing = kEssMissed * row.selected;
  const double ratio = o.ess.sparse_memory_ratio > 0 ? o.ess.sparse_memory_ratio : 1;
  const MissProfile::Point* const near =
      o.ess.profile.Nearest(static_cast<int64_t>(tokens), ratio, std::max(o.slots, 1));
  if (near != nullptr && layer < near->by_layer.size()) row.missing = near->by_layer[layer];
  if (ratio * tokens >= tokens && o.ess.sparse_memory_ratio > 0) row.missing = 0;
  row.recalled = row.missing;
  return row;
}

// What a step of a policy costs beside its bytes.
struct StepCost {
  const char* policy;
  // Share of its memory's rate that a step's operators reached, on an H200 at 8K to 64K tokens.
  double reached;
  int operators;  // operators of a layer
  // True: attention by CPU workers runs beside the GPU's attention alone, so that DRAM's time comes
  // on top of the rest.
  bool dram_adds;
  // Seconds from a layer's begin until CPU workers begin with the next layer's part, which that
  // layer waits for: a layer takes at least so long and the workers' time. On an H200, by a trace
  // (tests/bench/layer_chain.py). 0: nothing waits so.
  double ahead_seconds;
};
constexpr StepCost kCosts[] = {
    {"full", 0.93, 10, false, 0},   {"scout", 0.85, 19, false, 170e-6},
    {"recall", 0.54, 19, false, 0}, {"hgca", 0.60, 16, true, 0},
    {"ess", 0.80, 24, false, 0},
};

const StepCost& CostOf(const std::string& policy) {
  for (const StepCost& cost : kCosts) {
    if (policy == cost.policy) return cost;
  }
  return kCosts[0];
}

}  // namespace

PolicyStatistics ExpectedStatistics(const PolicyOptions& options, const CacheLayout& layout,
                                    double tokens) {
  PolicyStatistics expected;
  if (options.name == "full") return expected;
  const bool latent = HasLatents(layout);
  const int heads = latent ? 1 : layout.kinds[0].heads;
  expected.layers.resize(static_cast<size_t>(layout.layers));
  for (size_t i = 0; i < expected.layers.size(); ++i) {
    if (!latent && static_cast<int>(i) < options.dense_layers) continue;
    const Row row = options.name == "scout"    ? RowOfScout(options, i, tokens)
                    : options.name == "recall" ? RowOfRecall(options, tokens)
                    : options.name == "hgca"   ? RowOfHgca(options, tokens)
                                               : RowOfEss(options, i, tokens);
    const auto count = [&](double each) {
      return static_cast<int64_t>(each * heads * static_cast<double>(kRows));
    };
    PolicyStatistics::Layer& of = expected.layers[i];
    of.steps = kRows;
    of.selected = count(row.selected);
    of.missing = count(row.missing);
    of.recalled = count(row.recalled);
  }
  return expected;
}

StepForecast ForecastStep(const std::string& policy, const MemoryTraffic& bytes, int layers,
                          const DeviceRates& rates) {
  const StepCost& cost = CostOf(policy);
  const StepFloor floor = FloorOf(bytes, rates.memory);
  double seconds = floor.seconds;
  const double hbm = bytes.hbm / rates.memory.hbm, dram = bytes.dram / rates.memory.dram;
  if (rates.one_memory) {
    // What the device reads, what is copied and what the workers read share one memory.
    seconds = hbm + dram + bytes.to_device / rates.memory.to_device +
              bytes.to_host / rates.memory.to_host;
  } else if (cost.dram_adds) {
    seconds = std::max(seconds, hbm + dram);
  }
  seconds = seconds / cost.reached + rates.operator_seconds * cost.operators * layers;
  const double chain = cost.ahead_seconds * layers + dram;
  if (!rates.one_memory && cost.ahead_seconds > 0 && chain > seconds) return {chain, "DRAM"};
  return {seconds, floor.bound};
}

}  // namespace sluice
