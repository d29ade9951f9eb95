#include "src/profile/margin_run.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "src/base/rng.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/device.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr float kWidth = MarginHistogram::kBinWidth;

TEST_CASE("the least margin is found with which a selection holds its share of the mass") {
  MarginHistogram histogram;
  histogram.held = 50;
  histogram.mass[3] = 30;
  histogram.mass[100] = 15;
  histogram.mass[MarginHistogram::kBins - 1] = 5;
  CHECK(MarginFor(histogram, 0.4) == kWidth);  // the ring suffices
  CHECK(MarginFor(histogram, 0.8) == 4 * kWidth);
  CHECK(MarginFor(histogram, 0.81) == 101 * kWidth);
  CHECK(MarginFor(histogram, 0.95) == 101 * kWidth);
  CHECK(MarginFor(histogram, 1) == MarginHistogram::kBins * kWidth);
  CHECK(MarginFor(MarginHistogram(), 0.99) == kWidth);
}

// Returns softmax weights of the group's heads over tokens [0, row], summed, in double.
std::vector<double> NaiveWeights(const HeadQueries& head, int dim, int group, int row) {
  std::vector<double> sum(static_cast<size_t>(row + 1));
  for (int g = 0; g < group; ++g) {
    std::vector<double> of(sum.size());
    double all = 0;
    for (int t = 0; t <= row; ++t) {
      double dot = 0;
      for (int d = 0; d < dim; ++d) {
        dot += double{head.q[static_cast<size_t>((row * group + g) * dim + d)]} *
               head.k[static_cast<size_t>(t * dim + d)];
      }
      all += of[static_cast<size_t>(t)] = std::exp(dot / std::sqrt(dim));
    }
    for (size_t t = 0; t < of.size(); ++t) sum[t] += of[t] / all;
  }
  return sum;
}

TEST_CASE("rows divide their attention by how far partial scores lie below the largest") {
  constexpr int kDim = 8, kRank = 3, kGroup = 2, kTokens = 90, kRing = 16, kRows = 20;
  SplitMix64 random(TestSeed());
  HeadQueries head;
  for (int i = 0; i < kTokens * kDim; ++i) head.k.push_back(static_cast<float>(random.Uniform()));
  for (int i = 0; i < kTokens * kDim * kGroup; ++i) {
    head.q.push_back(static_cast<float>(8 * random.Uniform() - 4));
  }
  std::vector<float> projection;
  for (int i = 0; i < kDim * kRank; ++i) projection.push_back(static_cast<float>(random.Uniform()));
  MarginRunOptions options;
  options.ring_tokens = kRing;
  options.rows = kRows;
  options.rank = kRank;
  MarginHistogram histogram;
  AddRows(head, kDim, projection, options, &histogram);

  // What a margin selects is counted by its definition. The margins lie off the edges of bins'
  // tokens by more than rounding for nearly every seed, so a token may differ.
  for (const int bins : {4, 16, 48}) {
    double mass = 0, all = 0, held = 0;
    int64_t selected = 0;
    for (int row = kTokens - kRows; row < kTokens; ++row) {
      const std::vector<double> weights = NaiveWeights(head, kDim, kGroup, row);
      std::vector<double> scores(static_cast<size_t>(row), -INFINITY);
      for (int t = 0; t < row; ++t) {
        for (int g = 0; g < kGroup; ++g) {
          double score = 0;
          for (int r = 0; r < kRank; ++r) {
            double q = 0, k = 0;
            for (int d = 0; d < kDim; ++d) {
              const double p = double{projection[static_cast<size_t>(d * kRank + r)]};
              q += double{head.q[static_cast<size_t>((row * kGroup + g) * kDim + d)]} * p;
              k += double{head.k[static_cast<size_t>(t * kDim + d)]} * p;
            }
            score += q * k;
          }
          double& of = scores[static_cast<size_t>(t)];
          of = std::max(of, score / std::sqrt(kDim));
        }
      }
      const double largest = *std::max_element(scores.begin(), scores.end());
      for (int t = 0; t <= row; ++t) {
        const double weight = weights[static_cast<size_t>(t)];
        all += weight;
        if (t > row - kRing) {
          held += weight;
        } else if (largest - scores[static_cast<size_t>(t)] <= double{bins * kWidth}) {
          mass += weight;
          ++selected;
        }
      }
    }
    double found = 0, total = histogram.held;
    int64_t tokens = 0;
    for (int bin = 0; bin < MarginHistogram::kBins; ++bin) {
      total += histogram.mass[static_cast<size_t>(bin)];
      if (bin >= bins) continue;
      found += histogram.mass[static_cast<size_t>(bin)];
      tokens += histogram.tokens[static_cast<size_t>(bin)];
    }
    INFO("margin of " << bins << " bins");
    CHECK(histogram.held == Approx(held).epsilon(1e-4));
    CHECK(total == Approx(all).epsilon(1e-4));
    CHECK(found == Approx(mass).epsilon(0.01));
    CHECK(std::abs(tokens - selected) <= 2);
  }

  // A prompt inside the ring has no row to judge.
  MarginHistogram none;
  options.ring_tokens = 96;
  AddRows(head, kDim, projection, options, &none);
  CHECK(none.held == 0);
}

TEST_CASE(
    "a model's margins hold the share in every layer, and prompts within the ring are refused") {
  const std::unique_ptr<Device> device = *testing::TestDevice("auto");
  Model::Options options;
  options.directory = fixtures::ModelDir("tiny-llama");
  options.max_context = 512;
  options.max_rows = 100;
  options.max_logits = 1;
  options.kv_dtype = DType::kFloat32;
  const std::unique_ptr<Model> model = *Model::Load(options, device.get());
  const std::vector<Prompt> prompts = RandomTraffic(2, 200, model->config().vocab_size, TestSeed());
  MarginRunOptions run;
  run.ring_tokens = 32;
  run.rank = model->config().head_dim / 2;
  run.share = 0.9;
  const auto none = [](int64_t, int64_t) {};
  const auto found = MeasureMargins(run, device.get(), model.get(), prompts, none);
  REQUIRE(found.ok());
  REQUIRE(std::ssize(*found) == model->cache_layout().layers);
  for (const FoundMargin& of : *found) {
    CHECK(of.margin > 0);
    CHECK(of.captured >= 0.9);
    CHECK(of.selected > 0);
    CHECK(of.selected <= 1);
  }
  run.ring_tokens = 256;
  const absl::Status refused =
      MeasureMargins(run, device.get(), model.get(), prompts, none).status();
  CHECK(absl::IsInvalidArgument(refused));
  CHECK_THAT(std::string(refused.message()), Catch::Contains("longer prompts"));
}

}  // namespace
}  // namespace sluice
