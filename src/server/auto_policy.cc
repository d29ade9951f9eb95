#include "src/server/auto_policy.h"

#include <utility>

#include "src/base/status_macros.h"
#include "src/server/model_setup.h"
#include "src/server/plan.h"

namespace sluice {
namespace {

Config With(Config config, const PolicyAndBudget& taken) {
  config.set_policy(taken.policy);
  if (taken.digests) config.set_scout_selection("digests");
  if (taken.budget_tokens > 0) config.set_budget_tokens(static_cast<uint32_t>(taken.budget_tokens));
  return config;
}

}  // namespace

absl::StatusOr<ResolvedPolicy> ResolvePolicy(const Config& config, const Model& model,
                                             const MemoryFound& found, Device* device) {
  SLUICE_CHECK(config.policy() == kAutoPolicy);
  AutoAsk ask;
  ask.quality = QualityOf(config.quality());
  ask.sequences = config.max_sequences();
  ask.context = model.max_context();
  ask.layers = model.cache_layout().layers;
  // Before the candidates: what a profile or a setting lacks is an error whatever is taken.
  SLUICE_RETURN_IF_ERROR(
      PolicyOptionsOf(config, /*fingerprint=*/"", model.cache_layout()).status());
  SLUICE_ASSIGN_OR_RETURN(const DeviceRates rates, MeasureNodeRates(config, device));
  ResolvedPolicy out;
  for (PolicyAndBudget& of :
       AutoCandidates(ask.quality, model.cache_layout(), ask.context, config.budget_tokens())) {
    AutoCandidate& candidate = out.candidates.emplace_back();
    candidate.of = std::move(of);
    SLUICE_ASSIGN_OR_RETURN(const PlanInput::Policy planned,
                            PlanConfiguredPolicy(With(config, candidate.of), model, found, device));
    candidate.status = planned.status;
    if (!planned.status.ok()) continue;
    candidate.running = planned.rooms.back().running;
    candidate.bytes = planned.step_bytes;
    candidate.exact_tokens = planned.exact_tokens;
  }
  SLUICE_ASSIGN_OR_RETURN(out.choice, ChoosePolicy(ask, rates, out.candidates));
  out.config = With(config, out.candidates[out.choice.taken].of);
  out.text = AutoText(ask, rates, out.candidates, out.choice);
  return out;
}

}  // namespace sluice
