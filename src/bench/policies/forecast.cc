#include "src/bench/policies/forecast.h"

#include <algorithm>
#include <map>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace sluice::bench {
namespace {

// Returns the seconds of a step at `batch`, on the least-squares line through points (batch,
// seconds); null if the line does not rise. REQUIRES: two batches that differ.
std::optional<double> OnLine(const std::map<int, double>& points, double batch) {
  const auto count = static_cast<double>(points.size());
  double x = 0, y = 0, xx = 0, xy = 0;
  for (const auto& [at, seconds] : points) {
    x += at / count;
    y += seconds / count;
  }
  for (const auto& [at, seconds] : points) {
    xx += (at - x) * (at - x);
    xy += (at - x) * (seconds - y);
  }
  if (xy <= 0) return std::nullopt;
  const double seconds = y + xy / xx * (batch - x);
  if (seconds <= 0) return std::nullopt;
  return seconds;
}

}  // namespace

std::vector<Forecast> ForecastsOf(const std::vector<PolicyRun>& runs,
                                  const ForecastMemory& memory) {
  std::vector<Forecast> forecasts;
  for (const PolicyRun& run : runs) {
    const bool known = std::any_of(forecasts.begin(), forecasts.end(),
                                   [&](const Forecast& f) { return f.policy == run.policy; });
    std::map<int, double> points;
    for (const PolicyRun& other : runs) {
      if (other.policy == run.policy) points[other.batch] = other.step.median;
    }
    if (known || points.size() < 2 || run.admission.hbm_bytes_each <= 0) continue;
    Forecast& f = forecasts.emplace_back();
    f.policy = run.policy;
    f.context = run.context;
    f.batch = memory.hbm_bytes / run.admission.hbm_bytes_each;
    f.bound = "HBM";
    // Policy full uses DRAM only for caches on their way in.
    if (run.policy != "full" && run.admission.dram_bytes_each > 0 &&
        memory.dram_bytes / run.admission.dram_bytes_each < f.batch) {
      f.batch = memory.dram_bytes / run.admission.dram_bytes_each;
      f.bound = "DRAM";
    }
    for (const auto& [batch, seconds] : points) f.measured.push_back(batch);
    f.step_seconds = OnLine(points, static_cast<double>(f.batch));
  }
  return forecasts;
}

std::string ForecastText(const std::vector<Forecast>& forecasts, const ForecastMemory& memory) {
  const auto full = std::find_if(forecasts.begin(), forecasts.end(),
                                 [](const Forecast& f) { return f.policy == "full"; });
  std::string out;
  for (const Forecast& f : forecasts) {
    absl::StrAppendFormat(
        &out,
        "forecast with %.1f GiB of HBM for caches and %.0f GiB of DRAM: %s, context %d: %d "
        "sequences (bounded by %s), ",
        static_cast<double>(memory.hbm_bytes) / (1 << 30),
        static_cast<double>(memory.dram_bytes) / (1 << 30), f.policy, f.context, f.batch, f.bound);
    const std::string measured = absl::StrJoin(f.measured, ", ");
    if (const std::optional<double> rate = f.tokens_per_second(); !rate.has_value()) {
      absl::StrAppend(&out, "no speed: larger batches took no longer (measured ", measured, ")");
    } else {
      absl::StrAppendFormat(&out, "%.1f tokens/s by a line through batches %s", *rate, measured);
      if (full != forecasts.end() && &f != &*full && full->tokens_per_second().has_value()) {
        absl::StrAppendFormat(&out, ", %.2f x full", *rate / *full->tokens_per_second());
      }
    }
    absl::StrAppend(&out, "\n");
  }
  return out;
}

nlohmann::json ForecastJson(const Forecast& f, const ForecastMemory& memory) {
  const auto known = [](const std::optional<double>& value) {
    return value.has_value() ? nlohmann::json(*value) : nlohmann::json(nullptr);
  };
  return {{"policy", f.policy},
          {"context", f.context},
          {"hbm_bytes", memory.hbm_bytes},
          {"dram_bytes", memory.dram_bytes},
          {"batch", f.batch},
          {"bound", f.bound},
          {"measured_batches", f.measured},
          {"step_seconds", known(f.step_seconds)},
          {"tokens_per_second", known(f.tokens_per_second())}};
}

}  // namespace sluice::bench
