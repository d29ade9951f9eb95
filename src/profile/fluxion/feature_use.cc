#include "src/profile/fluxion/feature_use.h"

#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "src/base/rng.h"

namespace sluice {
namespace {

using Head = FluxionPredictor::Head;

std::vector<size_t> Shuffled(size_t count, uint64_t seed) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  SplitMix64 random(seed);
  for (size_t i = count; i > 1; --i) std::swap(order[i - 1], order[random.Below(i)]);
  return order;
}

}  // namespace

const std::array<const char*, kernels::kFluxionFeatures> kFluxionFeatureNames = {
    "layer",
    "query head",
    "tokens of the cpu segment",
    "tokens in HBM",
    "length of sink keys",
    "length of sink values",
    "length of the mean cpu key",
    "length of the mean cpu value",
    "cpu keys' lengths: mean",
    "cpu keys' lengths: variance",
    "cpu keys' lengths: skewness",
    "cpu keys' lengths: kurtosis",
    "cpu values' lengths: mean",
    "cpu values' lengths: variance",
    "cpu values' lengths: skewness",
    "cpu values' lengths: kurtosis",
    "product with the mean cpu key",
    "anchor's products: mean",
    "anchor's products: variance",
    "anchor's products: skewness",
    "anchor's products: kurtosis",
    "log-sum-exp: sink",
    "log-sum-exp: cpu (estimate)",
    "log-sum-exp: local",
    "anchor's log-sum-exp: sink",
    "anchor's log-sum-exp: cpu",
    "anchor's log-sum-exp: local",
    "output's length: sink",
    "output's length: local",
    "anchor's output's length: sink",
    "anchor's output's length: cpu",
    "anchor's output's length: local",
    "query's length",
    "anchor's query's length",
    "cosine with the anchor's query",
    "anchor's budget at 16",
    "anchor's budget at 32",
    "anchor's budget at 64",
    "anchor's budget at 128",
    "layer's longest output in HBM",
    "the same at the anchor",
};

FeatureUses MeasureFeatureUses(const FluxionPredictor& predictor,
                               absl::Span<const FluxionSample> samples, uint64_t seed) {
  FeatureUses uses;
  if (samples.empty()) return uses;
  const auto count = static_cast<double>(samples.size());
  std::vector<Head> whole;
  for (const FluxionSample& sample : samples) {
    whole.push_back(predictor.Predict(sample.features));
    uses.whole.streaming_right += whole.back().streaming == sample.streaming ? 1 / count : 0;
  }
  const std::vector<size_t> others = Shuffled(samples.size(), seed);
  for (size_t f = 0; f < uses.exchanged.size(); ++f) {
    FeatureUse& use = uses.exchanged[f];
    for (size_t i = 0; i < samples.size(); ++i) {
      auto features = samples[i].features;
      features[f] = samples[others[i]].features[f];
      const Head head = predictor.Predict(features);
      use.streaming_right += head.streaming == samples[i].streaming ? 1 / count : 0;
      use.streaming_changed += head.streaming != whole[i].streaming ? 1 / count : 0;
      use.budget_changed += std::abs(head.budgets[0] - whole[i].budgets[0]) / count;
    }
  }
  return uses;
}

}  // namespace sluice
