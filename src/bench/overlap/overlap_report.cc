#include "src/bench/overlap/overlap_report.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace sluice::bench {
namespace {

constexpr size_t kShownKernels = 6;

// Returns "-" if the value is not known.
std::string Cell(const char* form, bool known, double value) {
  const std::string text =
      known ? absl::StrFormat(absl::ParsedFormat<'f'>(form), value) : std::string("-");
  return absl::StrFormat(" %9s", text);
}

}  // namespace

std::string OverlapHeader() {
  return absl::StrFormat(
      "transfers: hidden = 1 - (step - step without transfers) / transfers alone; \"by rate\" "
      "takes the transfers' bytes at the rate of long lists instead; \"cover\" is the time that "
      "the "
      "layers' compute could hide at best, by their measured stages\n"
      "%-24s %8s %6s %7s %7s %7s %9s %9s %9s %9s %9s %9s %9s %9s %9s %9s %9s\n",
      "policy", "context", "batch", "misses", "least", "most", "step ms", "without", "exposed",
      "alone ms", "GB/s", "hidden", "by rate", "in step", "compute x", "cover ms", "of it");
}

std::string OverlapLines(const OverlapRun& run) {
  std::string out;
  for (const OverlapLevel& level : run.levels) {
    const LayerSpread misses = SpreadOfLayers(level.misses);
    const bool moved = level.alone.seconds > 0;
    absl::StrAppendFormat(&out, "%-24s %8d %6d %7.1f %7.1f %7.1f", run.policy, run.context,
                          run.batch, misses.mean, misses.least, misses.most);
    const std::optional<double> coverable = level.Coverable();
    const bool inside = moved && level.inside.has_value() && level.inside->seconds > 0;
    absl::StrAppend(
        &out, Cell("%.3f", true, level.step.median * 1e3),
        Cell("%.3f", true, level.without.median * 1e3), Cell("%.3f", true, level.exposed() * 1e3),
        Cell("%.3f", moved, level.alone.seconds * 1e3),
        Cell("%.1f", moved, level.alone.rate() / 1e9),
        Cell("%.1f%%", moved, 100 * level.HiddenOf(level.alone.seconds)),
        Cell("%.1f%%", moved, 100 * level.HiddenOf(level.rate_seconds)),
        Cell("%.1f", inside, inside ? level.alone.bytes / level.inside->seconds / 1e9 : 0),
        Cell("%.3f", level.compute_slowed > 0, level.compute_slowed),
        Cell("%.3f", moved && coverable.has_value(), coverable.value_or(0) * 1e3),
        Cell("%.1f%%", moved && coverable.value_or(0) > 0,
             100 * (level.alone.seconds - level.exposed()) / coverable.value_or(1)),
        "\n");
  }
  for (const OverlapLevel& level : run.levels) {
    if (level.alone.seconds <= 0 || level.kernels.empty()) continue;
    absl::StrAppendFormat(&out, "%s, batch %d, %.0f misses: slowed, us a step:", run.policy,
                          run.batch, SpreadOfLayers(level.misses).mean);
    for (size_t i = 0; i < std::min(level.kernels.size(), kShownKernels); ++i) {
      const ComparedKernel& kernel = level.kernels[i];
      absl::StrAppendFormat(&out, "%s %s %.0f from %.0f", i == 0 ? "" : ",", kernel.name,
                            kernel.with * 1e6, kernel.without * 1e6);
    }
    absl::StrAppend(&out, "\n");
  }
  const OverlapLevel& first = run.levels.front();
  if (!first.set.has_value()) {
    absl::StrAppendFormat(&out, "%s, batch %d: %.1f tokens/s, and %.1f if transfers took no time\n",
                          run.policy, run.batch, run.batch / first.step.median,
                          run.batch / first.without.median);
  }
  absl::StrAppendFormat(&out, "%s, batch %d: transfers of long lists by themselves %.1f GB/s\n",
                        run.policy, run.batch, run.long_rate / 1e9);
  return out;
}

nlohmann::json OverlapJson(const OverlapRun& run) {
  nlohmann::json levels = nlohmann::json::array();
  for (const OverlapLevel& level : run.levels) {
    const auto timing = [](const Timing& t) {
      return nlohmann::json{{"median", t.median}, {"p10", t.low}, {"p90", t.high}};
    };
    nlohmann::json j = {{"forced_misses", nullptr},
                        {"misses", SpreadOfLayers(level.misses).mean},
                        {"misses_by_layer", level.misses},
                        {"step_seconds", timing(level.step)},
                        {"without_seconds", timing(level.without)},
                        {"tokens_per_second", run.batch / level.step.median},
                        {"ceiling_tokens_per_second", run.batch / level.without.median},
                        {"exposed_seconds", level.exposed()},
                        {"bytes", level.alone.bytes},
                        {"alone_seconds", level.alone.seconds},
                        {"rate_seconds", level.rate_seconds},
                        {"hidden", level.HiddenOf(level.alone.seconds)},
                        {"hidden_by_rate", level.HiddenOf(level.rate_seconds)}};
    if (level.set.has_value()) j["forced_misses"] = *level.set;
    if (level.inside.has_value()) {
      j["inside_seconds"] = level.inside->seconds;
      j["inside_calls"] = level.inside->calls;
      if (level.inside->seconds > 0) {
        j["inside_bytes_per_second"] = level.alone.bytes / level.inside->seconds;
      }
    }
    if (level.compute_slowed > 0) j["compute_slowed"] = level.compute_slowed;
    for (const ComparedKernel& kernel : level.kernels) {
      j["kernels"].push_back(
          {{"name", kernel.name}, {"seconds", kernel.with}, {"without", kernel.without}});
    }
    if (level.shelter.has_value()) {
      j["beneath_seconds"] = level.shelter->beneath;
      j["ahead_seconds"] = level.shelter->ahead;
      j["coverable_seconds"] = *level.Coverable();
    }
    levels.push_back(std::move(j));
  }
  return {{"policy", run.policy},
          {"batch", run.batch},
          {"context", run.context},
          {"long_rate", run.long_rate},
          {"levels", std::move(levels)}};
}

}  // namespace sluice::bench
