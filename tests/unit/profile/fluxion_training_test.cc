#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "src/base/rng.h"
#include "src/profile/fluxion/feature_use.h"
#include "src/profile/fluxion/predictor_training.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using Form = FluxionPredictor::Form;

// Heads that follow a rule: budgets go by two features and grow with the block, up to noise that no
// feature tells, and the sign of a third feature says whether the head streams.
std::vector<FluxionSample> Samples(int count, int documents, SplitMix64& random) {
  std::vector<FluxionSample> samples(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    FluxionSample& sample = samples[static_cast<size_t>(i)];
    for (float& f : sample.features) f = static_cast<float>(2 * random.Uniform() - 1);
    sample.features[7] = 3;  // the same everywhere
    sample.features[8] *= 1e4f;
    sample.features[2] += std::copysign(0.1f, sample.features[2]);  // a margin
    sample.streaming = sample.features[2] > 0;
    sample.document = 10 * (i % documents);
    const auto noise = static_cast<float>(0.8 + 0.4 * random.Uniform());
    const float budget = (0.25f + 0.12f * sample.features[0] - 0.06f * sample.features[1]) * noise;
    for (size_t b = 0; b < sample.budgets.size(); ++b) {
      sample.budgets[b] = budget * (1 + 0.1f * static_cast<float>(b));
    }
  }
  return samples;
}

PredictorTrainingOptions Options(Form form) {
  PredictorTrainingOptions options;
  options.form = form;
  options.epochs = 8;
  options.batch = 64;
  options.false_streaming = 0.02;
  options.quantile = 0.9;
  return options;
}

void CheckError(const absl::Status& status, const std::string& words) {
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(std::string(status.message()), Catch::Matchers::Contains(words));
}

absl::Status ErrorOf(const std::vector<FluxionSample>& samples,
                     const PredictorTrainingOptions& options = Options(Form::kFour)) {
  return TrainFluxionPredictor(samples, options, nullptr).status();
}

}  // namespace

TEST_CASE("a predictor learns which heads stream, and budgets that mostly suffice") {
  SplitMix64 random(TestSeed());
  const std::vector<FluxionSample> samples = Samples(6000, 20, random);
  const std::vector<FluxionSample> others = Samples(2000, 1, random);
  const Form form = GENERATE(Form::kFour, Form::kLine);
  std::vector<std::pair<int64_t, int64_t>> seen;
  const auto trained = TrainFluxionPredictor(
      samples, Options(form), [&](int64_t done, int64_t all) { seen.emplace_back(done, all); });
  INFO(std::string(trained.status().message()));
  REQUIRE(trained.ok());
  CHECK(seen.size() == 8);
  CHECK(seen.back() == std::pair<int64_t, int64_t>{8, 8});
  CHECK(trained->predictor.tau == 0.1);
  CHECK(trained->predictor.deviation[7] == 1);
  CHECK(trained->predictor.parameters() == (form == Form::kFour ? 110085 : 109827));
  CHECK(trained->best_epoch >= 1);
  CHECK(trained->best_epoch <= 8);
  CHECK(trained->streaming_accuracy > 0.94);
  CHECK(trained->false_streaming <= 0.02);

  int right = 0, retrieval = 0;
  double enough = 0, given = 0, needed = 0;
  for (const FluxionSample& sample : others) {
    const FluxionPredictor::Head head = trained->predictor.Predict(sample.features);
    right += head.streaming == sample.streaming ? 1 : 0;
    if (sample.streaming) continue;
    ++retrieval;
    for (size_t i = 0; i < 4; ++i) {
      enough += head.budgets[i] >= sample.budgets[i + 1] ? 0.25 : 0;
      given += double{head.budgets[i]};
      needed += double{sample.budgets[i + 1]};
    }
  }
  CHECK(right > 0.95 * static_cast<double>(others.size()));
  // The 0.9 quantile of the noise is 1.16 times its mean.
  CHECK(enough / retrieval > 0.72);
  CHECK(enough / retrieval < 0.98);
  CHECK(given / needed < 1.4);
}

TEST_CASE("training repeats itself for one seed, and not for another") {
  SplitMix64 random(TestSeed());
  const std::vector<FluxionSample> samples = Samples(200, 5, random);
  PredictorTrainingOptions options = Options(Form::kFour);
  options.epochs = 2;
  options.batch = 30;  // neither rows nor the last batch fill tiles
  const auto first = TrainFluxionPredictor(samples, options, nullptr);
  const auto again = TrainFluxionPredictor(samples, options, nullptr);
  options.seed = 2;
  const auto other = TrainFluxionPredictor(samples, options, nullptr);
  REQUIRE(first.ok());
  REQUIRE(again.ok());
  REQUIRE(other.ok());
  CHECK(first->validation_loss == again->validation_loss);
  CHECK(first->predictor.streaming_threshold == again->predictor.streaming_threshold);
  for (size_t i = 0; i < 4; ++i) {
    CHECK(first->predictor.layers[i].weights == again->predictor.layers[i].weights);
    CHECK(first->predictor.layers[i].bias == again->predictor.layers[i].bias);
    CHECK(first->predictor.layers[i].weights != other->predictor.layers[i].weights);
  }
}

TEST_CASE("the threshold of streaming is the lowest that keeps heads which need a budget") {
  SplitMix64 random(TestSeed());
  std::vector<FluxionSample> samples = Samples(400, 5, random);
  for (FluxionSample& sample : samples) sample.streaming = random.Below(2) == 0;
  PredictorTrainingOptions options = Options(Form::kFour);
  options.epochs = 1;
  options.false_streaming = GENERATE(0.0, 0.1, 0.5);
  const auto trained = TrainFluxionPredictor(samples, options, nullptr);
  REQUIRE(trained.ok());
  const float threshold = trained->predictor.streaming_threshold;
  int retrieval = 0, above = 0, from = 0;
  for (const FluxionSample& sample : samples) {
    if (sample.document != 0 || sample.streaming) continue;  // the first of five is validation's
    const float score = FluxionSigmoid(trained->predictor.Outputs(sample.features).back());
    ++retrieval;
    above += score > threshold ? 1 : 0;
    from += score >= threshold ? 1 : 0;
  }
  CHECK(above <= options.false_streaming * retrieval);
  CHECK(from > options.false_streaming * retrieval);
  CHECK(trained->false_streaming == static_cast<double>(above) / retrieval);
}

TEST_CASE("samples and options that training cannot use are named") {
  SplitMix64 random(TestSeed());
  const std::vector<FluxionSample> good = Samples(60, 5, random);
  CheckError(ErrorOf({}), "0 documents, training needs 2 or more");
  CheckError(ErrorOf(Samples(60, 1, random)), "give more texts");

  std::vector<FluxionSample> samples = good;
  for (FluxionSample& sample : samples) sample.streaming = sample.document != 0;
  CheckError(ErrorOf(samples), "of training stream");
  for (FluxionSample& sample : samples) sample.streaming = sample.document == 0;
  CheckError(ErrorOf(samples), "of validation stream");

  samples = good;
  samples[17].features[40] = std::numeric_limits<float>::quiet_NaN();
  CheckError(ErrorOf(samples), "samples[17]: features[40]: expected a finite number, found nan");
  samples = good;
  samples[3].budgets[1] = std::numeric_limits<float>::infinity();
  CheckError(ErrorOf(samples), "samples[3]: budgets[1]: expected a share from 0 to 1, found inf");

  PredictorTrainingOptions options;
  options.quantile = 1;
  CheckError(ErrorOf(good, options), "quantile: expected a number between 0 and 1, found 1");
  options = {};
  options.epochs = 0;
  CheckError(ErrorOf(good, options), "epochs: expected 1 or more, found 0");
  options = {};
  options.batch = 0;
  CheckError(ErrorOf(good, options), "batch: expected 1 to 65536, found 0");
  options = {};
  options.rate = std::numeric_limits<double>::quiet_NaN();
  CheckError(ErrorOf(good, options), "rate: expected a number above 0, at most 1, found nan");
  options = {};
  options.false_streaming = 1;
  CheckError(ErrorOf(good, options), "false_streaming: expected a number from 0 to less than 1");
  options = {};
  options.tau = -1;
  CheckError(ErrorOf(good, options), "tau: expected 0 to 1, found -1");
}

TEST_CASE("a predictor's use of a feature is what the feature's exchange changes") {
  SplitMix64 random(TestSeed());
  const std::vector<FluxionSample> samples = Samples(3000, 5, random);
  const auto trained = TrainFluxionPredictor(samples, Options(Form::kFour), nullptr);
  REQUIRE(trained.ok());
  FluxionPredictor predictor = trained->predictor;
  // The network reads nothing of feature 5.
  FluxionPredictor::Layer& first = predictor.layers[0];
  for (int o = 0; o < first.out; ++o) first.weights[static_cast<size_t>(o * first.in + 5)] = 0;
  const FeatureUses uses = MeasureFeatureUses(predictor, samples, TestSeed());
  CHECK(uses.whole.streaming_right > 0.95);
  CHECK(uses.exchanged[5].streaming_changed == 0);
  CHECK(uses.exchanged[5].budget_changed == 0);
  CHECK(uses.exchanged[5].streaming_right == Approx(uses.whole.streaming_right));
  // Feature 2 alone says whether a head streams, and feature 0 says most of the budget.
  CHECK(uses.exchanged[2].streaming_right < 0.6);
  CHECK(uses.exchanged[2].streaming_changed > 0.4);
  for (const size_t other : {3, 6, 20}) {
    CHECK(uses.exchanged[0].budget_changed > 3 * uses.exchanged[other].budget_changed);
  }
}

}  // namespace sluice
