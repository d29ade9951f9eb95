#include "src/bench/policies/auto_run.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/policy_choice.h"
#include "src/model/policy_forecast.h"
#include "src/model/step_traffic.h"

namespace sluice::bench {
namespace {

// Auto is near the best if it has at least this share of its tokens/s.
constexpr double kNear = 0.95;

// The setting with which blocks are selected by their digests alone.
constexpr char kDigestsAlone[] = ":codes=0";

std::string NameOf(const PolicyAndBudget& of) {
  return absl::StrCat(of.policy,
                      of.budget_tokens == 0 ? "" : absl::StrCat(":budget=", of.budget_tokens),
                      of.digests ? kDigestsAlone : "");
}

// The runs that AutoDistanceText compares; null where there is none.
struct Compared {
  const PolicyRun* own = nullptr;
  const PolicyRun* best = nullptr;  // of the others
};
Compared CompareWithBest(const AutoRun& taken, const std::vector<PolicyRun>& runs) {
  Compared out;
  for (const PolicyRun& run : runs) {
    if (!run.largest) continue;
    if (IsAuto(run.policy)) {
      out.own = &run;
      continue;
    }
    // The name before its settings: variants without one of their ideas are not what a node takes.
    const std::string policy = run.policy.substr(0, run.policy.find(':'));
    bool known = false;
    for (const AutoCandidate& c : taken.candidates) known = known || c.of.policy == policy;
    if (!known || !MeetsQuality(taken.ask.quality, policy, run.budget_tokens, taken.ask.context)) {
      continue;
    }
    if (out.best == nullptr || run.tokens_per_second() > out.best->tokens_per_second()) {
      out.best = &run;
    }
  }
  return out;
}

// Whether auto took the very policy of that run, so that two runs differ by their spread alone.
bool TookTheSame(const AutoRun& taken, const PolicyRun& run) {
  const PolicyAndBudget& of = taken.candidates[taken.choice.taken].of;
  return run.policy.substr(0, run.policy.find(':')) == of.policy &&
         (run.policy.find(kDigestsAlone) != std::string::npos) == of.digests &&
         (of.budget_tokens == 0 || of.budget_tokens == run.budget_tokens);
}

}  // namespace

absl::StatusOr<AutoRun> TakePolicy(BenchTiers& tiers, PolicyWorld* world, const DeviceRates& rates,
                                   Quality quality, int context, int total) {
  const Model& model = *world->model;
  AutoRun out;
  out.ask = {quality, world->slots, context, model.cache_layout().layers};
  for (PolicyAndBudget& of :
       AutoCandidates(quality, model.cache_layout(), context, world->options.budget_tokens)) {
    AutoCandidate& candidate = out.candidates.emplace_back();
    candidate.of = std::move(of);
    const std::string name = NameOf(candidate.of);
    SLUICE_RETURN_IF_ERROR(tiers.Cut(world, name));
    const absl::StatusOr<std::unique_ptr<AttentionPolicy>> policy = SetUpPolicy(*world, name);
    candidate.status = policy.status();
    if (!policy.ok()) continue;
    candidate.exact_tokens = (*policy)->exact_tokens();
    candidate.running = LargestBatch(*world, **policy, context, total).batch;
    candidate.bytes =
        BytesOfStep(StepModel::Of(model), **policy,
                    ExpectedStatistics(OptionsOf(*world, name), model.cache_layout(), context),
                    static_cast<int>(candidate.running), context);
  }
  SLUICE_ASSIGN_OR_RETURN(out.choice, ChoosePolicy(out.ask, rates, out.candidates));
  out.name = NameOf(out.candidates[out.choice.taken].of);
  out.text = AutoText(out.ask, rates, out.candidates, out.choice);
  return out;
}

std::string AutoDistanceText(const AutoRun& taken, const std::vector<PolicyRun>& runs) {
  const auto [own, best] = CompareWithBest(taken, runs);
  if (own == nullptr || best == nullptr) return "";
  const double share = own->tokens_per_second() / best->tokens_per_second();
  return absl::StrFormat(
      "auto at context %d took %s: %.3f x the best of the others, %s (%.1f and %.1f tokens/s, "
      "forecast %.1f)%s\n",
      own->context, taken.name, share, best->policy, own->tokens_per_second(),
      best->tokens_per_second(), taken.choice.verdicts[taken.choice.taken].tokens_per_second,
      TookTheSame(taken, *best) ? ": the same policy, so that is the spread of two runs"
      : share < kNear           ? ": MORE THAN 5 % BELOW IT"
                                : "");
}

nlohmann::json AutoJson(const AutoRun& taken, const std::vector<PolicyRun>& runs) {
  nlohmann::json out = {{"context", taken.ask.context},
                        {"sequences", taken.ask.sequences},
                        {"quality", QualityName(taken.ask.quality)},
                        {"taken", taken.name},
                        {"why", taken.choice.why}};
  for (size_t i = 0; i < taken.candidates.size(); ++i) {
    const AutoCandidate& candidate = taken.candidates[i];
    const AutoVerdict& verdict = taken.choice.verdicts[i];
    out["candidates"].push_back({{"policy", candidate.of.policy},
                                 {"budget_tokens", candidate.of.budget_tokens},
                                 {"running", candidate.running},
                                 {"step_seconds", verdict.step_seconds},
                                 {"tokens_per_second", verdict.tokens_per_second},
                                 {"bound", verdict.bound},
                                 {"reason", verdict.reason}});
  }
  const auto [own, best] = CompareWithBest(taken, runs);
  if (own != nullptr && best != nullptr) {
    out["best"] = best->policy;
    out["took_the_best"] = TookTheSame(taken, *best);
    out["of_best"] = own->tokens_per_second() / best->tokens_per_second();
  }
  return out;
}

}  // namespace sluice::bench
