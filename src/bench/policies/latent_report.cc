#include "src/bench/policies/latent_report.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/bench/overlap/overlap_report.h"
#include "src/bench/policies/forecast.h"
#include "src/bench/policies/policies_report.h"
#include "src/bench/policies/selection_overlap.h"
#include "src/config/units.h"

namespace sluice::bench {
namespace {

constexpr int kComparedSteps = 16;  // Maximum steps in which selections of rows are compared.

}  // namespace

OverlapOptions LatentReport::OptionsFor(bool set) const {
  OverlapOptions overlap;
  overlap.steps = static_cast<int>(options_.steps);
  overlap.trace = options_.trace;
  if (!set) overlap.levels = {std::nullopt};
  if (set) overlap.levels.assign(options_.forced_misses.begin(), options_.forced_misses.end());
  return overlap;
}

int LatentReport::Tokens() const {
  int tokens = 0;
  if (options_.overlap) tokens = std::max(tokens, OverlapTokens(OptionsFor(false)));
  if (!options_.forced_misses.empty()) tokens = std::max(tokens, OverlapTokens(OptionsFor(true)));
  return tokens;
}

absl::Status LatentReport::Similarity(BenchTiers& tiers, PolicyWorld* world,
                                      const std::vector<std::string>& policies,
                                      const std::vector<Context>& contexts) {
  const auto policy = std::find_if(policies.begin(), policies.end(), [](const std::string& name) {
    return absl::StartsWith(name, "ess");
  });
  if (policy == policies.end() || !world->model->config().latent->indexer.has_value()) {
    return absl::OkStatus();
  }
  clock_->Begin("intra-layer overlap");
  SLUICE_RETURN_IF_ERROR(tiers.Cut(world, *policy));
  const int steps = std::min(kComparedSteps, 2 * static_cast<int>(options_.steps));
  SLUICE_ASSIGN_OR_RETURN(const std::vector<double> layers,
                          MeasureSelectionOverlap(*world, *policy, contexts, steps));
  clock_->Pause();
  if (layers.empty()) return absl::OkStatus();
  const auto context = static_cast<int>(contexts[0].tokens.size());
  out_.Print(SelectionOverlapText(layers, context));
  report_->details["intra_layer_overlap"].push_back({{"context", context}, {"layers", layers}});
  return absl::OkStatus();
}

absl::Status LatentReport::Overlap(const PolicyWorld& world, const std::string& policy,
                                   const std::vector<Context>& contexts, int batch,
                                   std::vector<StepTrace>* traces) {
  if (OptionsOf(world, policy).name == "full") return absl::OkStatus();
  for (const bool set : {false, true}) {
    if (set ? options_.forced_misses.empty() : !options_.overlap) continue;
    SLUICE_ASSIGN_OR_RETURN(OverlapRun run,
                            RunOverlap(world, policy, contexts, batch, OptionsFor(set)));
    absl::StrAppend(&overlap_text_, OverlapLines(run));
    if (!options_.runs) {
      out_.Print(absl::StrCat("\n", OverlapHeader(), overlap_text_));
      overlap_text_.clear();
    }
    report_->details["overlap"].push_back(OverlapJson(run));
    if (set) absl::StrAppend(&run.trace.name, ", forced misses");
    if (options_.trace && !options_.out.empty()) traces->push_back(std::move(run.trace));
  }
  return absl::OkStatus();
}

void LatentReport::Finish(const std::vector<PolicyRun>& runs) {
  if (!overlap_text_.empty()) {
    out_.Print(absl::StrCat("\n", OverlapHeader(), overlap_text_));
    overlap_text_.clear();
  }
  if (options_.forecast_dram.empty()) return;
  const std::string& hbm =
      options_.forecast_hbm.empty() ? options_.hbm_bytes : options_.forecast_hbm;
  const ForecastMemory memory = {static_cast<int64_t>(*ParseBytes(hbm)),
                                 static_cast<int64_t>(*ParseBytes(options_.forecast_dram))};
  const std::vector<Forecast> forecasts = ForecastsOf(runs, memory);
  out_.Print(ForecastText(forecasts, memory));
  for (const Forecast& forecast : forecasts) {
    report_->details["forecasts"].push_back(ForecastJson(forecast, memory));
  }
}

}  // namespace sluice::bench
