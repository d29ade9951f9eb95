#include "src/profile/hash_training.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>
#include <random>

#include "src/attention/policies/clo/hash_matrix.h"
#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kDim = 16, kGroup = 2;

// Queries and keys whose first two dimensions alone make the attention: they are points of a circle
// there, the same one for the queries of a token. In the others keys have noise of one length,
// which random directions mostly see.
HeadQueries HeadOfTwoDimensions(int tokens, SplitMix64& random) {
  HeadQueries head;
  std::mt19937_64 draws(random());
  std::normal_distribution<float> normal;
  const auto vector = [&](std::vector<float>* to, double angle, float radius, float noise) {
    std::vector<float> others(kDim - 2);
    for (float& x : others) x = normal(draws);
    const float length =
        std::sqrt(std::inner_product(others.begin(), others.end(), others.begin(), 0.0f));
    to->push_back(radius * static_cast<float>(std::cos(angle)));
    to->push_back(radius * static_cast<float>(std::sin(angle)));
    for (const float x : others) to->push_back(x * noise / length);
  };
  for (int t = 0; t < tokens; ++t) {
    vector(&head.k, 2 * M_PI * random.Uniform(), 1.5f, 3);
    const double angle = 2 * M_PI * random.Uniform();
    for (int g = 0; g < kGroup; ++g) vector(&head.q, angle, 10, 0.3f);
  }
  return head;
}

TEST_CASE("what codes hold of the attention is what a naive selection holds") {
  SplitMix64 random(TestSeed());
  constexpr int kTokens = 70, kBits = 32, kFirst = 40;
  HeadQueries head;
  std::mt19937_64 draws(random());
  std::normal_distribution<float> normal;
  for (int i = 0; i < kTokens * kDim; ++i) head.k.push_back(normal(draws));
  for (int i = 0; i < kTokens * kGroup * kDim; ++i) head.q.push_back(2 * normal(draws));
  const std::vector<float> hash = RandomHash({1, 1, kDim, kBits}, 3);
  const auto product = [&](const float* x, int b) {
    float sum = 0;
    for (int d = 0; d < kDim; ++d) sum += x[d] * hash[static_cast<size_t>(d * kBits + b)];
    return sum;
  };
  std::vector<float> centred = head.k;  // there are fewer keys than a centre takes
  for (int d = 0; d < kDim; ++d) {
    float centre = 0;
    for (int t = 0; t < kTokens; ++t) centre += head.k[static_cast<size_t>(t * kDim + d)];
    for (int t = 0; t < kTokens; ++t) {
      centred[static_cast<size_t>(t * kDim + d)] -= centre / kTokens;
    }
  }
  double sum = 0;
  for (int row = kFirst; row < kTokens; ++row) {
    std::vector<double> attention(static_cast<size_t>(row + 1)), scores(attention.size(), -1e30);
    for (int g = 0; g < kGroup; ++g) {
      const float* q = head.q.data() + (row * kGroup + g) * kDim;
      std::vector<double> weights;
      for (int t = 0; t <= row; ++t) {
        const float* k = head.k.data() + t * kDim;
        weights.push_back(std::exp(std::inner_product(q, q + kDim, k, 0.0) / std::sqrt(kDim)));
        const float* c = centred.data() + t * kDim;
        float largest = 0;
        for (int b = 0; b < kBits; ++b) largest = std::max(largest, std::abs(product(q, b)));
        double agreement = 0;
        for (int b = 0; b < kBits; ++b) {
          const float level = std::rint(product(q, b) * (7 / largest));
          agreement += product(c, b) > 0 ? double{level} : -double{level};
        }
        double& score = scores[static_cast<size_t>(t)];
        score = std::max(score, agreement * std::sqrt(std::inner_product(c, c + kDim, c, 0.0)));
      }
      const double all = std::accumulate(weights.begin(), weights.end(), 0.0);
      for (size_t t = 0; t < weights.size(); ++t) attention[t] += weights[t] / all;
    }
    const auto held_by = [&](const std::vector<double>& values) {
      std::vector<size_t> order(values.size());
      std::iota(order.begin(), order.end(), size_t{0});
      std::stable_sort(order.begin(), order.end(),
                       [&](size_t a, size_t b) { return values[a] > values[b]; });
      double held = 0;
      for (int i = 0; i < (row + 1) / 10; ++i) held += attention[order[static_cast<size_t>(i)]];
      return held;
    };
    sum += held_by(scores) / held_by(attention);
  }
  // Equal scores may be ordered by the last bit of a length.
  CHECK(HeldByCodes(head, kDim, hash.data(), kBits, kFirst) ==
        Approx(sum / (kTokens - kFirst)).margin(0.01));
  CHECK(HeldByCodes(head, kDim, hash.data(), kBits, kTokens) == 1);
}

TEST_CASE("training finds the dimensions that matter, the same ones each time") {
  SplitMix64 random(TestSeed());
  CapturedQueries captured;
  captured.layers = 2;
  captured.kv_heads = 1;
  captured.head_dim = kDim;
  captured.heads = {HeadOfTwoDimensions(600, random), HeadOfTwoDimensions(600, random)};
  HashTrainingOptions options;
  options.bits = 64;
  options.steps = 200;
  int64_t heads = 0;
  const auto count = [&](int64_t done, int64_t all) {
    CHECK(done == ++heads);
    CHECK(all == 2);
  };
  const TrainedHashes trained = TrainHashes(captured, options, 2, count);
  REQUIRE(std::ssize(trained.hash) == 2 * kDim * 64);
  for (const HashQuality& layer : trained.layers) {
    CHECK(layer.trained > layer.random + 0.03);  // of what was not trained with
    CHECK(layer.trained <= 1);
  }
  heads = 0;
  CHECK(TrainHashes(captured, options, 1, count).hash == trained.hash);
  options.seed = 2;
  heads = 0;
  CHECK(TrainHashes(captured, options, 1, count).hash != trained.hash);
}

}  // namespace
}  // namespace sluice
