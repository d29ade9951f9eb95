#include "src/profile/beta_run.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "src/base/rng.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/device.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

TEST_CASE("the largest beta is found with which a selection holds its share of the mass") {
  const std::vector<JudgedToken> tokens = {{4, 10}, {0.5f, 30}, {2, 50}, {0.1f, 9}, {0.01f, 1}};
  const FoundBeta most = BetaFor(tokens, 0.9);
  CHECK(most.beta < 0.5f);
  CHECK(most.beta > 0.49f);
  CHECK(most.selected == Approx(0.6));
  CHECK(most.captured == Approx(0.9));
  CHECK(BetaFor(tokens, 0.99).beta == Approx(0.1).epsilon(1e-3));
  CHECK(BetaFor(tokens, 1).beta == Approx(0.01).epsilon(1e-3));
  // Tokens with the same weight cannot be told apart.
  CHECK(BetaFor({{1, 1}, {1, 1}, {0.5f, 1}}, 0.3).selected == Approx(2 / 3.0));
  // Where nothing is attended to nothing is needed.
  CHECK(BetaFor({{1, 0}, {2, 0}}, 0.99).selected == 0);
  CHECK(BetaFor({}, 0.99).beta == 0);
}

TEST_CASE("a row judges the tokens outside its window, and later rows say what they hold") {
  constexpr int kDim = 8, kGroup = 2, kTokens = 150;
  BetaRunOptions options;
  options.block_tokens = 16;
  options.window_tokens = 32;
  options.rows = 20;
  SplitMix64 random(TestSeed());
  HeadQueries head;
  for (int i = 0; i < kTokens * kDim; ++i) head.k.push_back(static_cast<float>(random.Uniform()));
  for (int i = 0; i < kTokens * kDim * kGroup; ++i) {
    head.q.push_back(static_cast<float>(4 * random.Uniform()));
  }
  const std::vector<JudgedToken> judged = JudgeTokens(head, kDim, options);
  REQUIRE(judged.size() == 7 * 16);  // 130 tokens are before the first row behind
  const auto score = [&](int row, int g, int t) {
    double dot = 0;
    for (int d = 0; d < kDim; ++d) {
      dot += double{head.q[static_cast<size_t>((row * kGroup + g) * kDim + d)]} *
             head.k[static_cast<size_t>(t * kDim + d)];
    }
    return std::exp(dot / std::sqrt(kDim));
  };
  for (const int t : {0, 5, 111}) {
    double beta = 0, mass = 0;
    for (int g = 0; g < kGroup; ++g) {
      double sum = 0;
      for (size_t u = 0; u < judged.size(); ++u) sum += score(129, g, static_cast<int>(u));
      beta = std::max(beta, score(129, g, t) / sum * static_cast<double>(judged.size()));
      for (int row = 130; row < kTokens; ++row) {
        double all = 0;
        for (int u = 0; u <= row; ++u) all += score(row, g, u);
        mass += score(row, g, t) / all;
      }
    }
    CHECK(double{judged[static_cast<size_t>(t)].beta} == Approx(beta).epsilon(1e-4));
    CHECK(double{judged[static_cast<size_t>(t)].mass} == Approx(mass).epsilon(1e-4));
  }
  // With what follows, a token is selected wherever one of those before it in its block is.
  options.following = 3;
  const std::vector<JudgedToken> follows = JudgeTokens(head, kDim, options);
  for (size_t t = 0; t < judged.size(); ++t) {
    float beta = 0;
    for (size_t u = t - std::min<size_t>(3, t % 16); u <= t; ++u) {
      beta = std::max(beta, judged[u].beta);
    }
    CHECK(follows[t].beta == beta);
    CHECK(follows[t].mass == judged[t].mass);
  }
  options.window_tokens = 144;
  CHECK(JudgeTokens(head, kDim, options).empty());
}

TEST_CASE("a model's betas hold the share, and a prompt inside the window is refused") {
  const std::unique_ptr<Device> device = *testing::TestDevice("auto");
  Model::Options options;
  options.directory = fixtures::ModelDir("tiny-llama");
  options.max_context = 512;
  options.max_rows = 100;
  options.max_logits = 1;
  options.kv_dtype = DType::kFloat32;
  const std::unique_ptr<Model> model = *Model::Load(options, device.get());
  const std::vector<Prompt> prompts = RandomTraffic(2, 200, model->config().vocab_size, TestSeed());
  BetaRunOptions run;
  run.window_tokens = 64;
  run.block_tokens = 32;
  run.rows = 40;
  run.share = 0.9;
  const auto none = [](int64_t, int64_t) {};
  const auto found = MeasureBetas(run, device.get(), model.get(), prompts, none);
  REQUIRE(found.ok());
  REQUIRE(std::ssize(*found) == int64_t{model->cache_layout().layers} * model->config().kv_heads);
  for (const FoundBeta& of : *found) {
    CHECK(of.captured >= 0.9);
    CHECK(of.selected > 0);
    CHECK(of.selected <= 1);
  }
  run.window_tokens = 256;
  const absl::Status refused = MeasureBetas(run, device.get(), model.get(), prompts, none).status();
  CHECK(absl::IsInvalidArgument(refused));
  CHECK_THAT(std::string(refused.message()), Catch::Contains("longer prompts"));
}

}  // namespace
}  // namespace sluice
