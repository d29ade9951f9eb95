#include "tests/unit/attention/constant_predictor.h"

#include <cmath>
#include <string>
#include <utility>

namespace sluice::testing {

std::shared_ptr<const FluxionPredictor> ConstantPredictor(const std::vector<float>& budgets,
                                                          bool streaming) {
  FluxionPredictor predictor;
  predictor.model_fingerprint = std::string(64, 'a');
  predictor.tau = 0.1;
  predictor.streaming_threshold = 0.5f;
  predictor.mean.assign(kernels::kFluxionFeatures, 0);
  predictor.deviation.assign(kernels::kFluxionFeatures, 1);
  FluxionPredictor::Layer& layer = predictor.layers.emplace_back();
  layer.in = kernels::kFluxionFeatures;
  layer.out = FluxionOutputs(predictor.form);
  layer.weights.assign(static_cast<size_t>(layer.in * layer.out), 0);
  for (const float budget : budgets) layer.bias.push_back(std::log2(budget));
  layer.bias.push_back(streaming ? 9.0f : -9.0f);
  return std::make_shared<const FluxionPredictor>(std::move(predictor));
}

}  // namespace sluice::testing
