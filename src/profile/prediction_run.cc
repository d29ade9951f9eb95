#include "src/profile/prediction_run.h"

#include <algorithm>
#include <cstdint>
#include <memory>

#include "src/base/status_macros.h"
#include "src/bench/harness/query_watch.h"
#include "src/bench/workload/dictation.h"
#include "src/model/model.h"

namespace sluice {

absl::StatusOr<std::vector<double>> MeasurePredictions(const bench::PolicyWorld& world,
                                                       const bench::Context& context, int steps) {
  const ModelConfig& model = world.model->config();
  bench::PolicyWorld one = world;
  one.slots = 1;
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<AttentionPolicy> policy,
                          bench::SetUpPolicy(one, "clo"));
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<bench::QueryWatch> watch,
                          bench::QueryWatch::Create(policy.get(), model.layers, model.heads,
                                                    model.head_dim, world.device));
  SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<bench::Dictation> dictation,
                          bench::Dictation::Create({world.device, world.model, watch.get(),
                                                    world.dram, world.max_context}));
  SLUICE_RETURN_IF_ERROR(
      dictation->Begin(context, static_cast<int>(context.tokens.size()) + steps + 1));
  std::vector<double> cosines(static_cast<size_t>(model.layers));
  for (int step = 0; step <= steps; ++step) {
    SLUICE_ASSIGN_OR_RETURN(const auto logits, dictation->Step());
    for (int layer = 0; layer < model.layers && step > 0; ++layer) {
      cosines[static_cast<size_t>(layer)] += watch->MeanCosine(layer) / steps;
    }
    dictation->Append(
        static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
  }
  return cosines;
}

}  // namespace sluice
