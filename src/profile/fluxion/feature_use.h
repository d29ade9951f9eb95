// How much a predictor makes of each of its features: what becomes of its answers if the feature is
// another sample's. A feature whose exchange changes nothing is dead.
#pragma once

#include <array>
#include <cstdint>

#include "absl/types/span.h"
#include "src/attention/policies/fluxion/predictor.h"
#include "src/profile/fluxion/predictor_training.h"

namespace sluice {

// Names of the features, in the order of kernels::PredictBudgetsParams.
extern const std::array<const char*, kernels::kFluxionFeatures> kFluxionFeatureNames;

// Shares of the samples.
struct FeatureUse {
  double streaming_right = 0;  // of which it is told rightly whether the head streams
  // of which the feature's exchange changes whether the head streams, and by how much it changes
  // the budget at blocks of 16 tokens, on average
  double streaming_changed = 0, budget_changed = 0;
};
struct FeatureUses {
  FeatureUse whole;  // without an exchange
  std::array<FeatureUse, kernels::kFluxionFeatures> exchanged;
};

// Exchanges each feature in turn among all samples, by the same random order drawn from `seed`.
FeatureUses MeasureFeatureUses(const FluxionPredictor& predictor,
                               absl::Span<const FluxionSample> samples, uint64_t seed);

}  // namespace sluice
