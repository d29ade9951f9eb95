// The summary of samples of heads: known lines, quartiles and maps, and what is refused.
#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/profile/fluxion/command.h"
#include "src/profile/fluxion/sample_summary.h"
#include "tests/fixtures/fixtures.h"

namespace sluice {
namespace {

using Catch::Detail::Approx;
using nlohmann::json;

FluxionSample Sample(int layer, int head, bool streaming, std::array<float, 5> budgets = {},
                     int32_t document = 1) {
  FluxionSample sample{};
  sample.features[0] = static_cast<float>(layer);
  sample.features[1] = static_cast<float>(head);
  sample.budgets = budgets;
  sample.streaming = streaming;
  sample.document = document;
  return sample;
}

// Two layers of two heads. Head (0, 0) always streams, (0, 1) never, (1, 0) in one sample of three,
// and (1, 1) has the same budget at all sizes.
FluxionSamples SixSamples() {
  return {std::string(64, 'a'),
          0.25,
          {Sample(0, 0, true), Sample(0, 1, false, {0.125f, 0.375f, 0.4375f, 0.5f, 0.5625f}, 2),
           Sample(1, 0, true), Sample(1, 0, false, {0, 0.5f, 0.5f, 0.5f, 0.5f}),
           Sample(1, 0, false, {0, 0.5f, 0.5f, 0.5f, 0.5f}), Sample(1, 1, false, {1, 1, 1, 1, 1})}};
}

// Says of the heads of layer 0 that they stream, and of no others.
FluxionPredictor OfLayerNought() {
  FluxionPredictor predictor;
  predictor.model_fingerprint = std::string(64, 'a');
  predictor.form = FluxionPredictor::Form::kLine;
  predictor.tau = 0.25;
  predictor.streaming_threshold = 0.5f;
  predictor.mean.assign(kernels::kFluxionFeatures, 0);
  predictor.deviation.assign(kernels::kFluxionFeatures, 1);
  FluxionPredictor::Layer& layer = predictor.layers.emplace_back();
  layer.in = kernels::kFluxionFeatures;
  layer.out = 3;
  layer.weights.assign(static_cast<size_t>(3 * layer.in), 0);
  layer.weights[static_cast<size_t>(2 * layer.in)] = -10;
  layer.bias = {0, 0, 5};
  return predictor;
}

json ReadJson(const std::string& path) {
  std::ifstream file(path);
  return json::parse(file);
}

}  // namespace

TEST_CASE("budgets on a line have that line and an R2 of 1") {
  const BlockBudgets budgets = {0.125, 0.375, 0.4375, 0.5, 0.5625};
  for (const BudgetLine& line : {FitBudgetLine(budgets), PinBudgetLine(budgets)}) {
    CHECK(line.at_one == Approx(0.125));
    CHECK(line.slope == Approx(0.0625));
    CHECK(line.r2 == Approx(1));
  }
}

TEST_CASE("the fitted line is the nearest one, the pinned one begins at the least budget") {
  // By hand: log2 of the sizes is 0, 4, 5, 6, 7, with mean 4.4 and squares of 29.2 about it and of
  // 126 about 0; the budgets have squares of 0.2 about their mean of 0.4.
  const BlockBudgets budgets = {0, 0.5, 0.5, 0.5, 0.5};
  const BudgetLine fitted = FitBudgetLine(budgets);
  CHECK(fitted.slope == Approx(2.2 / 29.2));
  CHECK(fitted.at_one == Approx(0.4 - 4.4 * 2.2 / 29.2));
  CHECK(fitted.r2 == Approx(2.2 * 2.2 / (29.2 * 0.2)));
  const BudgetLine pinned = PinBudgetLine(budgets);
  CHECK(pinned.at_one == 0);
  CHECK(pinned.slope == Approx(11.0 / 126));
  CHECK(pinned.r2 == Approx(1 - (1 - 121.0 / 126) / 0.2));
  CHECK(std::isnan(FitBudgetLine({1, 1, 1, 1, 1}).r2));
}

TEST_CASE("samples are summarised by head, and over those that do not stream") {
  const FluxionPredictor predictor = OfLayerNought();
  const auto summary = SummarizeSamples(SixSamples(), &predictor);
  REQUIRE(summary.ok());
  CHECK(summary->samples == 6);
  CHECK(summary->streaming == 2);
  CHECK(summary->documents == 2);
  CHECK(summary->told == 2);
  CHECK(summary->right == 4);  // wrong: the sample of (0, 1), and the one of (1, 0) that streams
  // At blocks of 16 the four budgets are 0.375, 0.5, 0.5 and 1.
  CHECK(summary->median[1] == 0.5);
  CHECK(summary->first[1] == 0.5);
  CHECK(summary->third[0] == 0.125);
  CHECK(summary->third[4] == 0.5625);
  // The sample whose budgets are all 1 has no R2.
  REQUIRE(summary->fitted.samples == 3);
  REQUIRE(summary->fitted.percentiles.size() == 21);
  CHECK(summary->fitted.percentiles[10] == Approx(4.84 / 5.84));
  CHECK(summary->fitted.percentiles[20] == Approx(1));
  CHECK(summary->fitted.good == Approx(1.0 / 3));
  CHECK(summary->pinned.samples == 3);
  CHECK(summary->pinned.percentiles[0] < summary->fitted.percentiles[0]);

  REQUIRE(summary->heads.size() == 4);
  const HeadSummary& often = summary->heads[2];
  CHECK((often.layer == 1 && often.head == 0));
  CHECK((often.samples == 3 && often.streaming == 1 && often.told == 0 && often.right == 2));
  CHECK(often.budgets[0] == 0);
  CHECK(often.budgets[3] == 0.5);
  CHECK(often.line.slope == Approx(2.2 / 29.2));
}

TEST_CASE("a summary's JSON has null where nothing is known") {
  const json plain = SummaryJson(*SummarizeSamples(SixSamples(), nullptr));
  CHECK(plain["told"].is_null());
  CHECK(plain["heads"][0]["told"].is_null());
  CHECK(plain["heads"][0]["streaming"] == 1);
  CHECK(plain["heads"][0]["budgets"].is_null());  // which streams in every sample
  CHECK(plain["heads"][0]["line"].is_null());
  CHECK(plain["heads"][1]["budgets"][1] == 0.375);
  CHECK(plain["heads"][3]["line"]["slope"] == 0);
  CHECK(json::parse(plain.dump())["heads"][3]["line"]["r2"].is_null());
  const FluxionPredictor predictor = OfLayerNought();
  const json told = SummaryJson(*SummarizeSamples(SixSamples(), &predictor));
  CHECK(told["told"] == 2);
  CHECK(told["heads"][1]["told"] == 1);
  CHECK(told["heads"][1]["right"] == 0);
}

TEST_CASE("samples that all stream are a summary without budgets") {
  FluxionSamples samples = SixSamples();
  samples.samples.resize(1);
  const auto summary = SummarizeSamples(samples, nullptr);
  REQUIRE(summary.ok());
  CHECK(summary->retrieval() == 0);
  CHECK(summary->fitted.samples == 0);
  CHECK_THAT(SummaryText(*summary), Catch::Matchers::Contains("100.0 % stream"));
}

TEST_CASE("samples out of range, and none at all, are refused") {
  CHECK(
      absl::IsInvalidArgument(SummarizeSamples({std::string(64, 'a'), 0.1, {}}, nullptr).status()));
  FluxionSamples samples = SixSamples();
  FluxionSample& broken = samples.samples[3];
  SECTION("a layer that is no number") { broken.features[0] = NAN; }
  SECTION("half a head") { broken.features[1] = 0.5f; }
  SECTION("a layer beyond all models'") { broken.features[0] = 1e9f; }
  SECTION("a budget above 1") { broken.budgets[2] = 1.5f; }
  SECTION("a budget that is no number") { broken.budgets[4] = NAN; }
  const absl::Status refused = SummarizeSamples(samples, nullptr).status();
  CHECK(absl::IsInvalidArgument(refused));
  CHECK_THAT(std::string(refused.message()), Catch::Matchers::Contains("sample 3"));
}

TEST_CASE("a predictor of another model is refused") {
  FluxionPredictor other = OfLayerNought();
  other.model_fingerprint = std::string(64, 'b');
  CHECK(absl::IsFailedPrecondition(SummarizeSamples(SixSamples(), &other).status()));
}

TEST_CASE("the summary command writes JSON, and refuses files that do not fit") {
  const fixtures::TempDir dir;
  const std::string samples = dir.File("s"), predictor = dir.File("p"), out = dir.File("out");
  REQUIRE(WriteFluxionSamples(SixSamples(), samples).ok());
  REQUIRE(WriteFluxionPredictor(OfLayerNought(), predictor).ok());
  const auto run = [](const std::vector<std::string>& args) {
    std::vector<std::string> all = {"summary"};
    all.insert(all.end(), args.begin(), args.end());
    return RunFluxionCommand(all);
  };
  CHECK(run({"--help"}) == 0);
  CHECK(run({samples}) == 0);
  REQUIRE(run({samples, samples, "--predictor", predictor, "--json", out}) == 0);
  const json root = ReadJson(out);
  CHECK(root["format"] == "sluice-fluxion-summary");
  CHECK(root["samples"] == 12);
  CHECK(root["documents"] == 4);  // those of two files are different ones
  CHECK(root["told"] == 4);
  CHECK(root["blocks"] == json({1, 16, 32, 64, 128}));

  CHECK(run({}) == 2);
  CHECK(run({dir.File("none")}) == 1);
  CHECK(run({samples, "--predictor", dir.File("none")}) == 1);
  CHECK(run({samples, "--json", dir.File("no/such/folder")}) == 1);
  FluxionPredictor other = OfLayerNought();
  other.model_fingerprint = std::string(64, 'b');
  REQUIRE(WriteFluxionPredictor(other, predictor).ok());
  CHECK(run({samples, "--predictor", predictor}) == 1);
  std::ofstream(samples, std::ios::app) << "x";
  CHECK(run({samples}) == 1);
}

}  // namespace sluice
