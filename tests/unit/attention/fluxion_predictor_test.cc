#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/attention/policies/fluxion/predictor.h"
#include "src/base/rng.h"
#include "tests/fixtures/fixtures.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using nlohmann::json;
using Form = FluxionPredictor::Form;

const std::string kFingerprint(64, 'a');

float Draw(SplitMix64& random, double low, double high) {
  return static_cast<float>(low + (high - low) * random.Uniform());
}

std::vector<float> DrawMany(size_t count, SplitMix64& random, double low, double high) {
  std::vector<float> values(count);
  for (float& v : values) v = Draw(random, low, high);
  return values;
}

FluxionPredictor Predictor(Form form, SplitMix64& random) {
  FluxionPredictor predictor;
  predictor.model_fingerprint = kFingerprint;
  predictor.form = form;
  predictor.tau = 0.1;
  predictor.streaming_threshold = 0.4f;
  predictor.mean = DrawMany(kernels::kFluxionFeatures, random, -1, 1);
  predictor.deviation = DrawMany(kernels::kFluxionFeatures, random, 0.5, 2);
  int in = kernels::kFluxionFeatures;
  for (const int out : {256, 256, 128, FluxionOutputs(form)}) {
    const auto count = static_cast<size_t>(in) * static_cast<size_t>(out);
    const double scale = std::sqrt(6.0 / in);
    predictor.layers.push_back({in, out, DrawMany(count, random, -scale, scale),
                                DrawMany(static_cast<size_t>(out), random, -0.5, 0.5)});
    in = out;
  }
  return predictor;
}

std::vector<double> NaiveOutputs(const FluxionPredictor& predictor,
                                 const std::vector<float>& features) {
  std::vector<double> values;
  for (size_t i = 0; i < features.size(); ++i) {
    values.push_back((double{features[i]} - double{predictor.mean[i]}) /
                     double{predictor.deviation[i]});
  }
  for (const FluxionPredictor::Layer& layer : predictor.layers) {
    if (&layer != &predictor.layers.front()) {
      for (double& v : values) v *= 0.5 * std::erfc(-v / std::sqrt(2.0));
    }
    std::vector<double> sums(layer.bias.begin(), layer.bias.end());
    for (size_t o = 0; o < sums.size(); ++o) {
      for (size_t i = 0; i < values.size(); ++i) {
        sums[o] += double{layer.weights[o * values.size() + i]} * values[i];
      }
    }
    values = sums;
  }
  return values;
}

void CheckError(const absl::Status& status, absl::StatusCode code, const std::string& words) {
  CHECK(status.code() == code);
  CHECK_THAT(std::string(status.message()), Catch::Matchers::Contains(words));
}

// Returns the error of a file whose bytes were changed.
absl::Status Changed(const std::function<void(std::string&)>& change) {
  SplitMix64 random(5);
  const fixtures::TempDir dir;
  const std::string path = dir.File("p.fluxion");
  REQUIRE(WriteFluxionPredictor(Predictor(Form::kFour, random), path).ok());
  std::string bytes = *fixtures::ReadFile(path);
  change(bytes);
  REQUIRE(fixtures::WriteFile(path, bytes).ok());
  const absl::Status status = ReadFluxionPredictor(path).status();
  CHECK_THAT(std::string(status.message()), Catch::Matchers::StartsWith(path));
  return status;
}

absl::Status ChangedHeader(const std::function<void(json&)>& change) {
  return Changed([&](std::string& bytes) {
    const size_t end = bytes.find('\n');
    json header = json::parse(bytes.substr(0, end));
    change(header);
    bytes = header.dump() + bytes.substr(end);
  });
}

}  // namespace

TEST_CASE("a predictor's outputs are those of a naive network") {
  SplitMix64 random(TestSeed());
  const Form form = GENERATE(Form::kFour, Form::kLine);
  const FluxionPredictor predictor = Predictor(form, random);
  for (int i = 0; i < 40; ++i) {
    const std::vector<float> features = DrawMany(kernels::kFluxionFeatures, random, -3, 3);
    const std::vector<double> want = NaiveOutputs(predictor, features);
    const std::vector<float> outputs = predictor.Outputs(features);
    REQUIRE(outputs.size() == want.size());
    for (size_t o = 0; o < want.size(); ++o)
      CHECK(double{outputs[o]} == Approx(want[o]).margin(1e-3));
    const FluxionPredictor::Head head = predictor.Predict(features);
    for (size_t b = 0; b < 4; ++b) {
      const double budget =
          form == Form::kFour ? std::exp2(want[b]) : want[0] + want[1] * std::log2(16 << b);
      CHECK(double{head.budgets[b]} == Approx(std::clamp(budget, 0.0, 1.0)).margin(0.01));
    }
    const double share = 1 / (1 + std::exp(-want.back()));
    if (std::abs(share - 0.4) > 1e-3) CHECK(head.streaming == (share > 0.4));
  }
}

TEST_CASE("a head whose numbers are not finite is dense and does not stream") {
  SplitMix64 random(TestSeed());
  FluxionPredictor predictor = Predictor(GENERATE(Form::kFour, Form::kLine), random);
  predictor.streaming_threshold = 0;
  const std::vector<float> good = DrawMany(kernels::kFluxionFeatures, random, -1, 1);
  const std::array<float, 4> dense = {1, 1, 1, 1};
  for (const float wrong :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    std::vector<float> features = good;
    features[random.Below(kernels::kFluxionFeatures)] = wrong;
    const FluxionPredictor::Head head = predictor.Predict(features);
    CHECK(head.budgets == dense);
    CHECK_FALSE(head.streaming);
  }
  predictor.layers.back().bias[0] = std::numeric_limits<float>::quiet_NaN();
  const FluxionPredictor::Head head = predictor.Predict(good);
  CHECK(head.budgets[0] == 1);
  CHECK_FALSE(head.streaming);
}

TEST_CASE("a predictor is read as it was written") {
  SplitMix64 random(TestSeed());
  const fixtures::TempDir dir;
  const FluxionPredictor written = Predictor(GENERATE(Form::kFour, Form::kLine), random);
  REQUIRE(WriteFluxionPredictor(written, dir.File("p")).ok());
  REQUIRE(WriteFluxionPredictor(written, dir.File("p")).ok());  // in place of the old one
  CHECK(std::distance(std::filesystem::directory_iterator(dir.path()), {}) == 1);
  const auto read = ReadFluxionPredictor(dir.File("p"));
  INFO(std::string(read.status().message()));
  REQUIRE(read.ok());
  CHECK(read->model_fingerprint == kFingerprint);
  CHECK(read->form == written.form);
  CHECK(read->tau == written.tau);
  CHECK(read->streaming_threshold == written.streaming_threshold);
  CHECK(read->mean == written.mean);
  CHECK(read->deviation == written.deviation);
  CHECK(read->parameters() == written.parameters());
  REQUIRE(read->layers.size() == 4);
  for (size_t i = 0; i < 4; ++i) {
    CHECK(read->layers[i].weights == written.layers[i].weights);
    CHECK(read->layers[i].bias == written.layers[i].bias);
  }
  CHECK(CheckFluxionPredictor(*read, kFingerprint).ok());
  CheckError(CheckFluxionPredictor(*read, std::string(64, 'b')),
             absl::StatusCode::kFailedPrecondition, "train a predictor for this model");
}

TEST_CASE("a file that is not a predictor, or not whole, is refused with the remedy") {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const fixtures::TempDir dir;
  CheckError(ReadFluxionPredictor(dir.File("none")).status(), absl::StatusCode::kNotFound,
             "give the path of a predictor");
  CheckError(ReadFluxionPredictor(dir.path()).status(), kInvalid, "not a regular file");
  CheckError(Changed([](std::string& bytes) { bytes.clear(); }), kInvalid, "not a predictor");
  CheckError(Changed([](std::string& bytes) { bytes = "{}\n"; }), kInvalid, "not a predictor");
  CheckError(Changed([](std::string& bytes) { bytes.resize(100); }), kInvalid, "not a predictor");
  CheckError(Changed([](std::string& bytes) { bytes.pop_back(); }), kInvalid,
             "layers: expected 440340 bytes of weights, found 440339");
  CheckError(Changed([](std::string& bytes) { bytes += '\0'; }), kInvalid, "copy the file again");
  SplitMix64 random(TestSeed());
  for (int i = 0; i < 20; ++i) {
    INFO(i);
    CheckError(Changed([&](std::string& bytes) {
                 const size_t weights = bytes.find('\n') + 1;
                 char& byte = bytes[weights + random.Below(bytes.size() - weights)];
                 byte = static_cast<char>(byte ^ (1 << random.Below(8)));
               }),
               kInvalid, "crc32c: the checksum");
  }
}

TEST_CASE("a predictor's header is checked") {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  CheckError(ChangedHeader([](json& h) { h["format"] = "other"; }), kInvalid, "not a predictor");
  CheckError(ChangedHeader([](json& h) { h["version"] = 3; }), kInvalid,
             "version 3 of the format, this build reads 4: train the predictor again");
  CheckError(ChangedHeader([](json& h) { h["form"] = "cubic"; }), kInvalid, "form: expected");
  CheckError(ChangedHeader([](json& h) { h["form"] = "line"; }), kInvalid, "layers: expected");
  CheckError(ChangedHeader([](json& h) { h["tau"] = 2; }), kInvalid, "tau: expected");
  CheckError(ChangedHeader([](json& h) { h.erase("streaming_threshold"); }), kInvalid,
             "streaming_threshold: expected");
  CheckError(ChangedHeader([](json& h) { h["mean"].erase(0); }), kInvalid, "mean: expected");
  CheckError(ChangedHeader([](json& h) { h["deviation"] = "x"; }), kInvalid, "train the predictor");
  CheckError(ChangedHeader([](json& h) { h["layers"][0] = 40; }), kInvalid, "layers: expected");
  CheckError(ChangedHeader([](json& h) { h["layers"][1] = 1 << 30; }), kInvalid,
             "layers: expected");
  CheckError(ChangedHeader([](json& h) { h["layers"][1] = 255; }), kInvalid, "bytes of weights");
  CheckError(ChangedHeader([](json& h) { h.erase("crc32c"); }), kInvalid, "crc32c: expected");
  CheckError(ChangedHeader([](json& h) { h["mean"][3] = 0.125; }), kInvalid,
             "crc32c: the checksum");
  CheckError(ChangedHeader([](json& h) { h["model_fingerprint"] = std::string(64, 'b'); }),
             kInvalid, "crc32c: the checksum");
}

TEST_CASE("a predictor that does not fit together is not written") {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const fixtures::TempDir dir;
  const auto error = [&](const std::function<void(FluxionPredictor&)>& change) {
    SplitMix64 random(6);
    FluxionPredictor predictor = Predictor(Form::kLine, random);
    change(predictor);
    const absl::Status status = WriteFluxionPredictor(predictor, dir.File("p"));
    CHECK_FALSE(std::filesystem::exists(dir.File("p")));
    return status;
  };
  CheckError(error([](auto& p) { p.model_fingerprint = "abc"; }), kInvalid, "64 hexadecimal");
  CheckError(error([](auto& p) { p.deviation[4] = 0; }), kInvalid, "deviation");
  CheckError(error([](auto& p) { p.layers[1].weights.pop_back(); }), kInvalid, "layers[1]");
  CheckError(error([](auto& p) { p.layers.pop_back(); }), kInvalid, "layers[2]");
  CheckError(error([](auto& p) { p.layers[2].bias[3] = std::nanf(""); }), kInvalid,
             "layers[2]: a weight is not finite");
  SplitMix64 random(6);
  CheckError(WriteFluxionPredictor(Predictor(Form::kLine, random), dir.File("none/p")), kInvalid,
             "give a path that can be written");
}

}  // namespace sluice
