#include "src/bench/harness/scout_shares.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "src/base/status_macros.h"
#include "src/bench/workload/dictation.h"
#include "src/model/model.h"

namespace sluice::bench {

absl::StatusOr<std::vector<std::vector<double>>> MeasureShares(const PolicyWorld& world,
                                                               const Context& context, int steps) {
  PolicyWorld one = world;
  one.slots = 1;
  one.options.scout.recall = true;
  one.options.scout.intervals.assign(static_cast<size_t>(world.model->config().layers), steps);
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<AttentionPolicy> policy, SetUpPolicy(one, "scout"));
  SLUICE_ASSIGN_OR_RETURN(
      const std::unique_ptr<Dictation> dictation,
      Dictation::Create({world.device, world.model, policy.get(), world.dram, world.max_context}));
  SLUICE_RETURN_IF_ERROR(
      dictation->Begin(context, static_cast<int>(context.tokens.size()) + ShareTokens(steps) + 1));
  const auto step_once = [&]() -> absl::Status {
    SLUICE_ASSIGN_OR_RETURN(const auto logits, dictation->Step());
    dictation->Append(
        static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    return absl::OkStatus();
  };
  for (int i = steps; i < ShareTokens(steps); ++i) SLUICE_RETURN_IF_ERROR(step_once());
  std::vector<std::vector<double>> shares;
  PolicyStatistics before = policy->Statistics();
  before.layers.resize(static_cast<size_t>(world.model->config().layers));
  for (int i = 0; i < steps; ++i) {
    SLUICE_RETURN_IF_ERROR(step_once());
    PolicyStatistics now = policy->Statistics();
    std::vector<double>& layers = shares.emplace_back();
    for (size_t layer = 0; layer < now.layers.size(); ++layer) {
      PolicyStatistics::Layer step;
      step.steps = now.layers[layer].steps - before.layers[layer].steps;
      step.missing = now.layers[layer].missing - before.layers[layer].missing;
      layers.push_back(step.Share(world.options.budget_tokens, world.model->config().kv_heads));
    }
    before = std::move(now);
  }
  return shares;
}

}  // namespace sluice::bench
