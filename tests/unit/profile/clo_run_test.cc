#include "src/profile/clo_run.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "src/base/rng.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/device.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kDim = 8, kGroup = 3, kTokens = 90;

// Queries that walk, and any keys.
HeadQueries RandomHead(SplitMix64& random) {
  HeadQueries head;
  const auto draw = [&] { return static_cast<float>(2 * random.Uniform() - 1); };
  for (int i = 0; i < kTokens * kDim; ++i) head.k.push_back(draw());
  for (int i = 0; i < kGroup * kDim; ++i) head.q.push_back(draw());
  for (int i = kGroup * kDim; i < kTokens * kGroup * kDim; ++i) {
    head.q.push_back(0.9f * head.q[static_cast<size_t>(i - kGroup * kDim)] + 0.3f * draw());
  }
  return head;
}

TEST_CASE("a head's attention outside and the similarity of its queries are those of naive sums") {
  SplitMix64 random(TestSeed());
  const HeadQueries head = RandomHead(random);
  CloRunOptions options;
  options.first_tokens = 2;
  options.newest_tokens = 10;
  CloHead got;
  MeasureCloHead(head, kDim, options, &got);
  const auto at = [&](const std::vector<float>& x, int row) {
    return x.begin() + int64_t{row} * kDim;
  };
  const auto dot = [&](auto a, auto b) {
    double sum = 0;
    for (int d = 0; d < kDim; ++d) sum += double{a[d]} * double{b[d]};
    return sum;
  };
  const auto similarity = [&](int a, int b) {
    double inverse = 0;
    for (int g = 0; g < kGroup; ++g) {
      const auto x = at(head.q, a * kGroup + g), y = at(head.q, b * kGroup + g);
      const double cosine = dot(x, y) / std::sqrt(dot(x, x) * dot(y, y));
      inverse += cosine > 0 ? 1 / cosine : INFINITY;
    }
    return kGroup / inverse;
  };
  double adjacent = 0;
  int label = kTokens / 2, hits = 0, lookups = 0;
  for (int row = kTokens / 2 + 1; row < kTokens; ++row, ++lookups) {
    adjacent += similarity(row, row - 1);
    if (similarity(row, label) >= 0.8) {
      ++hits;
    } else {
      label = row;
    }
  }
  CHECK(got.lookups == lookups);
  CHECK(got.hits == hits);
  CHECK(got.MeanSimilarity() == Approx(adjacent / lookups));
  CHECK(hits > 0);
  CHECK(hits < lookups);
  std::vector<double> outside(kGroup);
  int rows = 0;
  for (int row = kTokens / 2; row < kTokens; ++row, ++rows) {
    for (int g = 0; g < kGroup; ++g) {
      double all = 0, outer = 0;
      for (int t = 0; t <= row; ++t) {
        const double weight =
            std::exp(dot(at(head.q, row * kGroup + g), at(head.k, t)) / std::sqrt(kDim));
        all += weight;
        if (t >= 2 && t <= row - 10) outer += weight;
      }
      outside[static_cast<size_t>(g)] += outer / all;
    }
  }
  REQUIRE(got.rows == rows);  // so few rows are all measured
  for (size_t g = 0; g < outside.size(); ++g) CHECK(got.outside[g] == Approx(outside[g]));
  // A second prompt adds to the first.
  MeasureCloHead(head, kDim, options, &got);
  CHECK(got.lookups == 2 * lookups);
  CHECK(got.outside[1] == Approx(2 * outside[1]));
}

TEST_CASE("a gate is 1 where a twentieth of the attention goes outside, and 0 where none does") {
  CHECK(GateOf(0) == 0);
  CHECK(GateOf(0.025) == Approx(0.5));
  CHECK(GateOf(0.05) == 1);
  CHECK(GateOf(0.9) == 1);
}

TEST_CASE("every head of a model is measured, and prompts that are too short are refused") {
  const std::unique_ptr<Device> device = *testing::TestDevice("auto");
  Model::Options options;
  options.directory = fixtures::ModelDir("tiny-llama");
  options.max_context = 512;
  options.max_rows = 100;
  options.max_logits = 1;
  options.kv_dtype = DType::kFloat32;
  const std::unique_ptr<Model> model = *Model::Load(options, device.get());
  const std::vector<Prompt> prompts = RandomTraffic(2, 200, model->config().vocab_size, TestSeed());
  CloRunOptions run;
  run.newest_tokens = 32;
  const auto none = [](int64_t, int64_t) {};
  const auto found = MeasureClo(run, device.get(), model.get(), prompts, none);
  REQUIRE(found.ok());
  REQUIRE(std::ssize(*found) == int64_t{model->cache_layout().layers} * model->config().kv_heads);
  for (const CloHead& head : *found) {
    CHECK(head.lookups == 2 * 99);
    CHECK(std::ssize(head.outside) == model->config().heads / model->config().kv_heads);
    CHECK(head.MeanSimilarity() <= 1);
  }
  run.newest_tokens = 64;
  const absl::Status refused = MeasureClo(run, device.get(), model.get(), prompts, none).status();
  CHECK(absl::IsInvalidArgument(refused));
  CHECK_THAT(std::string(refused.message()), Catch::Contains("--context"));
}

}  // namespace
}  // namespace sluice
