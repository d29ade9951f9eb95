#include "src/bench/policies_report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace sluice {

using nlohmann::json;

std::string RunHeader() {
  return absl::StrFormat("%-17s %8s %7s %9s %9s %9s %7s %7s %7s %10s %8s\n", "policy", "context",
                         "batch", "tokens/s", "p50 ms", "p99 ms", "idle", "CPU", "hits", "link MB",
                         "interval");
}

std::string RunLine(const PolicyRun& run, bool largest) {
  const std::string interval =
      run.RecallInterval() > 0 ? absl::StrFormat("%.1f", run.RecallInterval()) : "-";
  return absl::StrFormat("%-17s %8d %6d%s %9.1f %9.2f %9.2f %6.1f%% %6.1f%% %6.1f%% %10.3f %8s\n",
                         run.policy, run.context, run.batch, largest ? "*" : " ",
                         run.tokens_per_second(), run.tpot_p50 * 1e3, run.tpot_p99 * 1e3,
                         100 * run.idle_share, 100 * run.CpuShare(), 100 * run.HitRate(),
                         run.LinkBytesPerStep() / 1e6, interval);
}

std::string NoRoomLine(const std::string& policy, int context, int batch, int largest) {
  return absl::StrFormat("%-17s %8d %6d  does not fit: %d do\n", policy, context, batch, largest);
}

Figure RunFigure(const PolicyRun& run) {
  Figure f = SecondsFigure(
      absl::StrFormat("step, %s, context %d, batch %d", run.policy, run.context, run.batch),
      run.step);
  f.more = {{"tokens_per_second", run.tokens_per_second()},
            {"tpot_p50_seconds", run.tpot_p50},
            {"tpot_p99_seconds", run.tpot_p99},
            {"idle_share", run.idle_share},
            {"cpu_share", run.CpuShare()},
            {"hit_rate", run.HitRate()},
            {"link_bytes_per_step", run.LinkBytesPerStep()},
            {"recall_interval", run.RecallInterval()}};
  return f;
}

json RunJson(const PolicyRun& run, bool largest) {
  json layers = json::array();
  for (const PolicyStatistics::Layer& layer : run.statistics.layers) {
    layers.push_back({{"steps", layer.steps},
                      {"selected", layer.selected},
                      {"missing", layer.missing},
                      {"recalled", layer.recalled},
                      {"recalls", layer.recalls},
                      {"link_bytes", layer.link_bytes},
                      {"cpu_share", layer.Share(run.budget_tokens, run.kv_heads)},
                      {"hit_rate", layer.HitRate()}});
  }
  json out = {
      {"policy", run.policy}, {"context", run.context},          {"batch", run.batch},
      {"largest", largest},   {"step_seconds", run.step.median}, {"layers", std::move(layers)}};
  for (const auto& [name, value] : RunFigure(run).more) out[name] = value;
  return out;
}

namespace {

// Mean, least and largest of the layers that select; zeros where none does.
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
                        "scout's CPU share, no recall");
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

std::string QualityHeader() {
  return absl::StrFormat("%-17s %8s %7s %9s %10s %12s %9s %10s %7s\n", "policy", "context", "steps",
                         "top-1", "KL, nats", "perplexity", "change", "pass keys", "lost");
}

std::string QualityLine(const PolicyQuality& q, int context) {
  std::string out = absl::StrFormat("%-17s %8d %7d ", q.policy, context, q.distance.steps());
  if (q.distance.steps() > 0) {
    absl::StrAppendFormat(&out, "%8.2f%% %10.5f %12.4f %+8.2f%%", 100 * q.distance.top1_agreement(),
                          q.distance.mean_kl(), q.distance.perplexity(),
                          100 * q.distance.perplexity_change());
  } else {
    absl::StrAppendFormat(&out, "%9s %10s %12s %9s", "-", "-", "-", "-");
  }
  if (q.passkeys == 0) return absl::StrCat(out, absl::StrFormat(" %10s %7s\n", "-", "-"));
  return absl::StrCat(
      out, absl::StrFormat(" %10s %7d\n", absl::StrCat(q.found, "/", q.passkeys), q.lost));
}

Figure QualityFigure(const PolicyQuality& q, int context) {
  Figure f;
  f.name = absl::StrFormat("top-1 agreement with full, %s, context %d", q.policy, context);
  f.unit = "1";
  f.median = f.low = f.high = q.distance.top1_agreement();
  f.samples = q.distance.steps();
  f.more = {{"mean_kl_nats", q.distance.mean_kl()},
            {"perplexity", q.distance.perplexity()},
            {"perplexity_change", q.distance.perplexity_change()}};
  return f;
}

json QualityJson(const PolicyQuality& q, int context) {
  json out = {{"policy", q.policy},
              {"context", context},
              {"passkeys", q.passkeys},
              {"passkeys_found", q.found},
              {"passkeys_full", q.found_full},
              {"passkeys_lost", q.lost},
              {"steps", q.distance.steps()}};
  if (q.distance.steps() == 0) return out;
  out["top1_agreement"] = q.distance.top1_agreement();
  for (const auto& [name, value] : QualityFigure(q, context).more) out[name] = value;
  return out;
}

}  // namespace sluice
