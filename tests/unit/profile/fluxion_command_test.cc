#include <algorithm>
#include <catch2/catch.hpp>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/base/rng.h"
#include "src/profile/fluxion/command.h"
#include "src/profile/fluxion/sample_file.h"
#include "tests/fixtures/fixtures.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

// A document of token ids below 200, as a line of a traffic file.
void WriteDocuments(const std::string& path, int documents, int tokens) {
  SplitMix64 random(TestSeed());
  std::ofstream file(path);
  for (int i = 0; i < documents; ++i) {
    for (int t = 0; t < tokens; ++t) file << random.Below(200) << ' ';
    file << '\n';
  }
}

}  // namespace

TEST_CASE("samples of a model's documents are collected, train a predictor, and it is checked") {
  const fixtures::TempDir dir;
  const std::string model = fixtures::ModelDir("tiny-llama");
  WriteDocuments(dir.File("documents"), 5, 500);
  const std::vector<std::string> of = {"--model",         model, "--traffic", dir.File("documents"),
                                       "--anchor-stride", "400", "--rows",    "2"};
  std::vector<std::string> collect = {"collect", "--out", dir.File("samples")};
  collect.insert(collect.end(), of.begin(), of.end());
  REQUIRE(RunFluxionCommand(collect) == 0);
  const auto samples = ReadFluxionSamples(dir.File("samples"));
  REQUIRE(samples.ok());
  CHECK(samples->tau == 0.1);
  CHECK(samples->model_fingerprint.size() == 64);
  CHECK(samples->samples.size() % 10 == 0);
  CHECK(samples->samples.back().document >= 1);

  REQUIRE(RunFluxionCommand({"train", dir.File("samples"), "--out", dir.File("p"), "--epochs", "2",
                             "--form", "line"}) == 0);
  const auto predictor = ReadFluxionPredictor(dir.File("p"));
  REQUIRE(predictor.ok());
  CHECK(predictor->model_fingerprint == samples->model_fingerprint);
  std::vector<std::string> check = {
      "check", dir.File("p"), "--samples", dir.File("samples"), "--first-document", "5"};
  check.insert(check.end(), of.begin(), of.end());
  check.insert(check.end(), {"--json", dir.File("check.json")});
  CHECK(RunFluxionCommand(check) == 0);
  std::ifstream written(dir.File("check.json"));
  const auto compared = nlohmann::json::parse(written);
  CHECK(compared["model_fingerprint"] == samples->model_fingerprint);
  CHECK(compared["cpu_tokens"] > 0);
  const auto& sources = compared["sources"];
  REQUIRE(sources.size() == 7);  // with the table and the predictor
  CHECK(sources[0]["name"] == "fixed (16, 0.05)");
  CHECK(sources[1]["name"] == "oracle");
  CHECK(sources[1]["streaming_right"] == sources[1]["heads"]);
  CHECK(sources[6]["name"] == "p");
  for (const auto& source : sources) {
    CHECK(source["bytes"] == source["digests"].get<int64_t>() + source["tokens"].get<int64_t>());
    CHECK(source["heads"] == sources[0]["heads"]);
  }
  CHECK(RunFluxionCommand({"features", dir.File("p"), "--samples", dir.File("samples")}) == 0);
  CHECK(RunFluxionCommand({"features", dir.File("p")}) == 2);

  SECTION("the published form has digests without a spread, and budgets by these") {
    collect[2] = dir.File("published");
    collect.push_back("--all-levels");
    REQUIRE(RunFluxionCommand(collect) == 0);
    const auto published = ReadFluxionSamples(dir.File("published"));
    REQUIRE(published.ok());
    REQUIRE(published->samples.size() == samples->samples.size());
    // Blocks are ranked otherwise, so some budget differs.
    CHECK_FALSE(std::equal(samples->samples.begin(), samples->samples.end(),
                           published->samples.begin(),
                           [](const FluxionSample& a, const FluxionSample& b) {
                             return std::ranges::equal(a.budgets, b.budgets);
                           }));
    check[3] = dir.File("published");
    check.push_back("--all-levels");
    CHECK(RunFluxionCommand(check) == 0);
  }
  SECTION("a damaged file, and one of another model, are refused") {
    auto other = *samples;
    other.model_fingerprint = std::string(64, 'b');
    REQUIRE(WriteFluxionSamples(other, dir.File("other")).ok());
    check[3] = dir.File("other");
    CHECK(RunFluxionCommand(check) == 1);
    CHECK(RunFluxionCommand(
              {"train", dir.File("samples"), dir.File("other"), "--out", dir.File("q")}) == 1);
    std::ofstream(dir.File("other"), std::ios::app) << "x";
    const absl::Status damaged = ReadFluxionSamples(dir.File("other")).status();
    CHECK_THAT(std::string(damaged.message()),
               Catch::Matchers::Contains("copy the file again, or collect the samples again"));
  }
}

TEST_CASE("samples are read as they were written") {
  const fixtures::TempDir dir;
  SplitMix64 random(TestSeed());
  FluxionSamples written{std::string(64, 'a'), 0.125, {}};
  for (int i = 0; i < 20; ++i) {
    FluxionSample& sample = written.samples.emplace_back();
    for (float& f : sample.features) f = static_cast<float>(random.Uniform());
    for (float& b : sample.budgets) b = static_cast<float>(random.Uniform());
    sample.streaming = i % 3 == 0;
    sample.document = i;
  }
  REQUIRE(WriteFluxionSamples(written, dir.File("s")).ok());
  const auto read = ReadFluxionSamples(dir.File("s"));
  REQUIRE(read.ok());
  CHECK(read->tau == 0.125);
  REQUIRE(read->samples.size() == 20);
  for (size_t i = 0; i < 20; ++i) {
    CHECK(read->samples[i].features == written.samples[i].features);
    CHECK(read->samples[i].budgets == written.samples[i].budgets);
    CHECK(read->samples[i].streaming == written.samples[i].streaming);
    CHECK(read->samples[i].document == written.samples[i].document);
  }
}

TEST_CASE("commands of fluxion that lack something end with a status of their own") {
  CHECK(RunFluxionCommand({"--help"}) == 0);
  CHECK(RunFluxionCommand({"train", "--help"}) == 0);
  CHECK(RunFluxionCommand({}) == 2);
  CHECK(RunFluxionCommand({"guess"}) == 2);
  CHECK(RunFluxionCommand({"collect"}) == 2);
  CHECK(RunFluxionCommand({"collect", "--tau", "7", "--out", "x"}) == 2);
  CHECK(RunFluxionCommand({"collect", "--out", "x"}) == 1);
  CHECK(RunFluxionCommand({"train", "--out", "x"}) == 2);
  CHECK(RunFluxionCommand({"check", "no-such-file"}) == 1);
  CHECK(RunFluxionCommand({"collect", "--out", "x", "--model", fixtures::ModelDir("tiny-llama")}) ==
        1);
}

}  // namespace sluice
