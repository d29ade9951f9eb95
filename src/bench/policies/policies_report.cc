#include "src/bench/policies/policies_report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace sluice::bench {

using nlohmann::json;

std::string RunHeader() {
  return absl::StrFormat("%-24s %8s %7s %9s %9s %9s %7s %7s %7s %7s %10s %8s %6s\n", "policy",
                         "context", "batch", "tokens/s", "p50 ms", "p99 ms", "idle", "busy", "CPU",
                         "hits", "link MB", "interval", "ends");
}

std::string RunLine(const PolicyRun& run) {
  const std::string interval =
      run.RecallInterval() > 0 ? absl::StrFormat("%.1f", run.RecallInterval()) : "-";
  return absl::StrFormat(
      "%-24s %8d %6d%s %9.1f %9.2f %9.2f %6.1f%% %6.1f%% %6.1f%% %6.1f%% %10.3f %8s %6s\n",
      run.policy, run.context, run.batch, run.largest ? "*" : " ", run.tokens_per_second(),
      run.tpot_p50 * 1e3, run.tpot_p99 * 1e3, 100 * run.idle_share, 100 * run.WorkersBusy(),
      100 * run.CpuShare(), 100 * run.HitRate(), run.LinkBytesPerStep() / 1e6, interval,
      run.largest ? run.admission.bound : "");
}

std::string NoRoomLine(const std::string& policy, int context, int batch, int largest) {
  return absl::StrFormat("%-24s %8d %6d  does not fit: at most %d sequences do\n", policy, context,
                         batch, largest);
}

Figure RunFigure(const PolicyRun& run) {
  Figure f = SecondsFigure(
      absl::StrFormat("step, %s, context %d, batch %d", run.policy, run.context, run.batch),
      run.step);
  f.more = {{"tokens_per_second", run.tokens_per_second()},
            {"tpot_p50_seconds", run.tpot_p50},
            {"tpot_p99_seconds", run.tpot_p99},
            {"idle_share", run.idle_share},
            {"workers_busy_share", run.WorkersBusy()},
            {"cpu_share", run.CpuShare()},
            {"hit_rate", run.HitRate()},
            {"link_bytes_per_step", run.LinkBytesPerStep()},
            {"recall_interval", run.RecallInterval()}};
  return f;
}

json RunJson(const PolicyRun& run) {
  json layers = json::array();
  for (const PolicyStatistics::Layer& layer : run.statistics.layers) {
    layers.push_back({{"steps", layer.steps},
                      {"selected", layer.selected},
                      {"missing", layer.missing},
                      {"recalled", layer.recalled},
                      {"recalls", layer.recalls},
                      {"lookups", layer.lookups},
                      {"misses", layer.misses},
                      {"link_bytes", layer.link_bytes},
                      {"recall_interval",
                       layer.recalls == 0
                           ? 0
                           : static_cast<double>(layer.steps) / static_cast<double>(layer.recalls)},
                      {"cpu_share", layer.Share(run.budget_tokens, run.kv_heads)},
                      {"hit_rate", layer.HitRate()}});
  }
  json out = {{"policy", run.policy},
              {"taken", run.taken},
              {"context", run.context},
              {"batch", run.batch},
              {"largest", run.largest},
              {"step_seconds", run.step.median},
              {"layers", std::move(layers)},
              {"budget_tokens", run.budget_tokens},
              {"cpu_tokens", run.CpuTokens()},
              {"hgca_beta", run.beta},
              {"largest_batch", run.admission.batch},
              {"batch_ends_at", run.admission.bound},
              {"dram_tokens_each", run.admission.each.dram_tokens.most()},
              {"hbm_tokens_each", run.admission.each.hbm_tokens.most()},
              {"workers",
               {{"count", run.workers.workers},
                {"busy_seconds", absl::ToDoubleSeconds(run.workers.busy)},
                {"tokens", run.workers.tokens},
                {"failed", run.workers.failed}}}};
  if (run.latent && !run.statistics.layers.empty()) {
    out["misses_by_layer"] = MissesByLayer(run.statistics);
    out["misses_first_by_layer"] = MissesByLayer(run.first);
    out["misses_steady_by_layer"] = MissesByLayer(run.steady);
    out["first_steps"] = kFirstSteps;
  }
  for (const auto& [name, value] : RunFigure(run).more) out[name] = value;
  return out;
}

std::string RatesText(const MemoryTraffic& rates, int workers) {
  return absl::StrFormat(
      "rates in this run: HBM %.0f GB/s; link %.1f GB/s to the device, %.1f back; DRAM %.0f GB/s "
      "read by %d threads\n",
      rates.hbm / 1e9, rates.to_device / 1e9, rates.to_host / 1e9, rates.dram / 1e9, workers);
}

json ToJson(const MemoryTraffic& traffic) {
  return {{"hbm", traffic.hbm},
          {"to_device", traffic.to_device},
          {"to_host", traffic.to_host},
          {"dram", traffic.dram}};
}

namespace {

// A run's tokens/s and its floor's tokens/s, relative to those of full at its largest batch.
struct Ratios {
  double measured = 0, floors = 0;
};
Ratios RatiosOf(const PolicyRun& run, const MemoryTraffic& rates, const PolicyRun* full) {
  if (full == nullptr) return {};
  const auto ideal = [&](const PolicyRun& r) {
    return r.batch / FloorOf(r.step_bytes, rates).seconds;
  };
  return {run.tokens_per_second() / full->tokens_per_second(), ideal(run) / ideal(*full)};
}

}  // namespace

std::string FloorHeader() {
  return absl::StrFormat("%-24s %8s %7s %10s %8s %8s %8s %9s %6s %9s %8s %8s %9s\n", "policy",
                         "context", "batch", "HBM MB", "up MB", "down MB", "DRAM MB", "floor ms",
                         "bound", "of floor", "x full", "floors x", "reached");
}

std::string FloorLine(const PolicyRun& run, const MemoryTraffic& rates, const PolicyRun* full) {
  const StepFloor floor = FloorOf(run.step_bytes, rates);
  std::string out = absl::StrFormat(
      "%-24s %8d %6d%s %10.1f %8.2f %8.2f %8.2f %9.3f %6s %8.1f%%", run.policy, run.context,
      run.batch, run.largest ? "*" : " ", run.step_bytes.hbm / 1e6, run.step_bytes.to_device / 1e6,
      run.step_bytes.to_host / 1e6, run.step_bytes.dram / 1e6, floor.seconds * 1e3, floor.bound,
      100 * floor.seconds / run.step.median);
  if (full == nullptr) return absl::StrCat(out, "\n");
  const Ratios ratios = RatiosOf(run, rates, full);
  return absl::StrCat(out, absl::StrFormat(" %8.2f %8.2f %8.1f%%\n", ratios.measured, ratios.floors,
                                           100 * ratios.measured / ratios.floors));
}

std::string ScoutRatios(const std::vector<PolicyRun>& runs) {
  std::string out;
  for (const PolicyRun& scout : runs) {
    if (scout.policy != "scout") continue;
    std::string line;
    for (const PolicyRun& other : runs) {
      const bool same = scout.largest ? other.largest : other.batch == scout.batch;
      if (&other == &scout || !same) continue;
      absl::StrAppendFormat(&line, "%s %.2f x %s", line.empty() ? "" : ",",
                            scout.tokens_per_second() / other.tokens_per_second(), other.policy);
    }
    if (line.empty()) continue;
    absl::StrAppend(
        &out, "scout at ",
        scout.largest ? "the largest batch of each" : absl::StrCat("batch ", scout.batch), ":",
        line, "\n");
  }
  return out;
}

std::string SelectionOverlapText(const std::vector<double>& layers, int context) {
  const LayerSpread share = SpreadOfLayers(layers);
  return absl::StrFormat(
      "\nintra-layer overlap at context %d: a row shares %.1f%% of its selection with the row "
      "before, %.1f%% to %.1f%% by layer\n",
      context, 100 * share.mean, 100 * share.least, 100 * share.most);
}

std::string MissesText(const std::vector<PolicyRun>& runs) {
  std::string out;
  for (const PolicyRun& run : runs) {
    if (!run.latent || run.statistics.layers.empty()) continue;
    const LayerSpread misses = SpreadOfLayers(MissesByLayer(run.statistics));
    const double first = SpreadOfLayers(MissesByLayer(run.first)).mean;
    const double steady = SpreadOfLayers(MissesByLayer(run.steady)).mean;
    absl::StrAppendFormat(
        &out, "%s, batch %d: a sequence misses %.0f entries in a step, %.0f to %.0f by layer; ",
        run.policy, run.batch, misses.mean, misses.least, misses.most);
    absl::StrAppendFormat(&out, "in its first %d steps %.0f, in the last ones %.0f", kFirstSteps,
                          first, steady);
    absl::StrAppend(&out, steady > 0 ? absl::StrFormat(": %.2f x\n", first / steady) : "\n");
  }
  return out;
}

json FloorJson(const PolicyRun& run, const MemoryTraffic& rates, const PolicyRun* full) {
  const StepFloor floor = FloorOf(run.step_bytes, rates);
  json out = {{"step_bytes", ToJson(run.step_bytes)},
              {"floor_seconds", floor.seconds},
              {"floor_bound", floor.bound},
              {"of_floor", floor.seconds / run.step.median}};
  if (full == nullptr) return out;
  const Ratios ratios = RatiosOf(run, rates, full);
  out["over_full"] = ratios.measured;
  out["floors_over_full"] = ratios.floors;
  out["of_floor_ratio"] = ratios.measured / ratios.floors;
  return out;
}

namespace {

// Mean, least and largest over the layers that select; zeros if none does.
struct Spread {
  double mean = 0, low = 0, high = 0;
};
Spread SpreadOf(const std::vector<double>& layers) {
  Spread out;
  int count = 0;
  for (const double share : layers) {
    if (share == 0) continue;
    out.low = count == 0 ? share : std::min(out.low, share);
    out.high = std::max(out.high, share);
    out.mean += share;
    ++count;
  }
  if (count > 0) out.mean /= count;
  return out;
}

}  // namespace

std::string StatisticsText(const WorkloadStatistics& statistics,
                           const std::vector<std::vector<double>>& shares, int context) {
  std::string out = absl::StrFormat(
      "\nworkload at context %d: cosine of predicted and real queries %.3f (by layer", context,
      statistics.MeanCosine());
  for (size_t i = 1; i < statistics.layers.size(); ++i) {
    absl::StrAppendFormat(&out, " %.3f", statistics.layers[i].cosine);
  }
  absl::StrAppendFormat(
      &out,
      ");\nimportant blocks change by %.1f%% a step; full's choice is the path's next in %.0f%% of "
      "steps\n",
      100 * statistics.MeanChange(), 100 * statistics.greedy);
  absl::StrAppendFormat(&out, "%6s %30s %32s\n", "step", "important blocks since step 0",
                        "scout's CPU share since a recall");
  const std::vector<double> away = statistics.MeanAway();
  for (size_t step = 0; step < shares.size(); ++step) {
    const Spread spread = SpreadOf(shares[step]);
    absl::StrAppendFormat(&out, "%6d %29.1f%% %14.1f%% (%.1f-%.1f)\n", step, 100 * away[step],
                          100 * spread.mean, 100 * spread.low, 100 * spread.high);
  }
  return out;
}

json StatisticsJson(const WorkloadStatistics& statistics,
                    const std::vector<std::vector<double>>& shares, int context) {
  json cosines = json::array(), changes = json::array();
  for (const WorkloadStatistics::Layer& layer : statistics.layers) {
    cosines.push_back(layer.cosine);
    changes.push_back(layer.change);
  }
  return {{"context", context},
          {"query_cosine", statistics.MeanCosine()},
          {"query_cosine_by_layer", std::move(cosines)},
          {"important_change_per_step", statistics.MeanChange()},
          {"important_change_by_layer", std::move(changes)},
          {"important_since_step_0", statistics.MeanAway()},
          {"greedy_follows_path", statistics.greedy},
          {"scout_cpu_share_without_recall", shares}};
}

}  // namespace sluice::bench
