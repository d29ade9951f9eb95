#include "src/bench/harness/synthetic_predictor.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/fluxion_segments.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"

namespace sluice::bench {
namespace {

using Head = FluxionPredictor::Head;
using Features = std::array<float, kernels::kFluxionFeatures>;
using kernels::kFluxionLevels;

// Features that the network looks at: layer, query head, cosine with the anchor's query.
constexpr size_t kLayer = 0, kHead = 1, kCosine = 34;
constexpr float kUsualCosine = 0.6f;
constexpr int kWidths[] = {kernels::kFluxionFeatures, 256, 256, 128, kFluxionLevels + 1};
// The deviation of the logarithm of budgets among heads, and how it rises from one size of block to
// the next: values like those of SmolLM2's heads.
constexpr double kSpread = 1.2, kRise = 0.35;

double Normal(SplitMix64& random) {
  double sum = 0;
  for (int i = 0; i < 12; ++i) sum += random.Uniform();
  return sum - 6;
}

FluxionPredictor RandomNetwork(const SyntheticPredictorOptions& options) {
  FluxionPredictor predictor;
  predictor.model_fingerprint.assign(64, '0');
  predictor.tau = 0.1;
  predictor.streaming_threshold = 0.5f;
  // Features that the network does not look at are divided by so much that they are nothing.
  predictor.mean.assign(kernels::kFluxionFeatures, 0);
  predictor.deviation.assign(kernels::kFluxionFeatures, 1e12f);
  const auto looks = [&](size_t feature, double mean, double deviation) {
    predictor.mean[feature] = static_cast<float>(mean);
    predictor.deviation[feature] = static_cast<float>(deviation);
  };
  looks(kLayer, 0.5 * (options.layers - 1), 0.3 * options.layers);
  looks(kHead, 0.5 * (options.heads - 1), 0.3 * options.heads);
  looks(kCosine, kUsualCosine, 1);
  SplitMix64 random(options.seed);
  for (size_t i = 0; i + 1 < std::size(kWidths); ++i) {
    FluxionPredictor::Layer& layer = predictor.layers.emplace_back();
    layer.in = kWidths[i];
    layer.out = kWidths[i + 1];
    // Large weights of the first layer make neighbouring heads differ.
    const double scale = i == 0 ? 3 : 1.5 / std::sqrt(layer.in);
    for (int w = 0; w < layer.in * layer.out; ++w) {
      layer.weights.push_back(static_cast<float>(scale * Normal(random)));
    }
    for (int b = 0; b < layer.out; ++b) {
      layer.bias.push_back(static_cast<float>(scale * Normal(random)));
    }
  }
  return predictor;
}

// Calls body(features) for each query head, in order.
template <typename Body>
void ForEachHead(const SyntheticPredictorOptions& options, Body body) {
  for (int layer = 0; layer < options.layers; ++layer) {
    for (int head = 0; head < options.heads; ++head) {
      Features features = {};
      features[kLayer] = static_cast<float>(layer);
      features[kHead] = static_cast<float>(head);
      features[kCosine] = kUsualCosine;
      body(features);
    }
  }
}

// Makes output `o` of the last layer a times what it is, plus b.
void Scale(FluxionPredictor* predictor, int o, double a, double b) {
  FluxionPredictor::Layer& last = predictor->layers.back();
  for (int i = 0; i < last.in; ++i) {
    float& weight = last.weights[static_cast<size_t>(o * last.in + i)];
    weight = static_cast<float>(a * weight);
  }
  float& bias = last.bias[static_cast<size_t>(o)];
  bias = static_cast<float>(a * bias + b);
}

// Gives the logarithms of budgets their spread, with a mean of 0 at blocks of 16, and the logits
// the share of heads that stream.
void Standardise(const SyntheticPredictorOptions& options, FluxionPredictor* predictor) {
  std::vector<std::vector<float>> outputs(kFluxionLevels + 1);
  // A head's budgets go together: all of them follow the first output.
  FluxionPredictor::Layer& last = predictor->layers.back();
  for (int level = 1; level < kFluxionLevels; ++level) {
    std::copy_n(last.weights.begin(), last.in, last.weights.begin() + level * last.in);
    last.bias[static_cast<size_t>(level)] = last.bias[0];
  }
  ForEachHead(options, [&](const Features& features) {
    const std::vector<float> of = predictor->Outputs(features);
    for (size_t o = 0; o < of.size(); ++o) outputs[o].push_back(of[o]);
  });
  double mean = 0, square = 0;
  const auto count = static_cast<double>(outputs[0].size());
  for (const float v : outputs[0]) mean += v / count;
  for (const float v : outputs[0]) square += (v - mean) * (v - mean) / count;
  const double scale = kSpread / std::sqrt(square);
  for (int level = 0; level < kFluxionLevels; ++level) {
    Scale(predictor, level, scale, kRise * level - scale * mean);
  }
  std::vector<float>& logits = outputs.back();
  std::sort(logits.begin(), logits.end());
  const auto at = static_cast<size_t>((1 - options.streaming) * count);
  Scale(predictor, kFluxionLevels, 1, -logits[std::min(at, logits.size() - 1)]);
}

}  // namespace

double SyntheticVolume(const FluxionPredictor& predictor, const SyntheticPredictorOptions& options,
                       double fixed_share) {
  const kernels::FluxionSegments segments =
      kernels::SegmentsOf(static_cast<int32_t>(options.tokens - 1));
  const int group = options.heads / options.kv_heads;
  double sum = 0;
  std::vector<Head> heads;
  ForEachHead(options, [&](const Features& features) {
    Head head = {{1, 1, 1, 1}, false};
    if (fixed_share >= 0) {
      head.budgets[0] = static_cast<float>(fixed_share);
    } else {
      head = predictor.Predict(features);
    }
    heads.push_back(head);
    if (std::ssize(heads) < group) return;
    int64_t best = 0;
    const bool all =
        std::all_of(heads.begin(), heads.end(), [](const Head& h) { return h.streaming; });
    for (int level = 0; level < kFluxionLevels && !all; ++level) {
      int64_t volume = kernels::CpuBlocks(segments, level);
      for (const Head& h : heads) {
        if (h.streaming) continue;
        volume += int64_t{kernels::LevelTokens(level)} *
                  kernels::BlocksOfShare(segments, level, h.budgets[static_cast<size_t>(level)]);
      }
      best = level == 0 ? volume : std::min(best, volume);
    }
    sum += static_cast<double>(best);
    heads.clear();
  });
  return sum / (options.layers * options.kv_heads);
}

std::shared_ptr<const FluxionPredictor> WithoutStreaming(const FluxionPredictor& predictor) {
  auto out = std::make_shared<FluxionPredictor>(predictor);
  out->streaming_threshold = 1;  // no sigmoid is above it
  return out;
}

std::shared_ptr<const FluxionPredictor> AtOneLevel(const FluxionPredictor& predictor, int level) {
  SLUICE_CHECK(predictor.form == FluxionPredictor::Form::kFour);
  auto out = std::make_shared<FluxionPredictor>(predictor);
  for (int other = 0; other < kFluxionLevels; ++other) {
    if (other != level) Scale(out.get(), other, 0, 0);  // the logarithm of 1
  }
  return out;
}

std::shared_ptr<const FluxionPredictor> SyntheticPredictor(
    const SyntheticPredictorOptions& options) {
  FluxionPredictor predictor = RandomNetwork(options);
  Standardise(options, &predictor);
  const double wanted = SyntheticVolume(predictor, options, options.fixed_share) / options.smaller;
  double low = -16, high = 0;  // logarithm of the middle budget
  for (int i = 0; i < 20; ++i) {
    const double middle = (low + high) / 2;
    FluxionPredictor tried = predictor;
    for (int level = 0; level < kFluxionLevels; ++level) Scale(&tried, level, 1, middle);
    (SyntheticVolume(tried, options) < wanted ? low : high) = middle;
  }
  for (int level = 0; level < kFluxionLevels; ++level) Scale(&predictor, level, 1, low);
  return std::make_shared<const FluxionPredictor>(std::move(predictor));
}

}  // namespace sluice::bench
