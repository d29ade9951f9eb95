// Tests the tables and the JSON of --quality: what counts, what is compared with what.
#include "src/bench/policies/quality_report.h"

#include <catch2/catch.hpp>

namespace sluice::bench {
namespace {

using Catch::Matchers::Contains;

Distance DistanceWith(bool agrees) {
  const std::vector<float> up = {1, 0}, down = {0, 1};
  Distance out;
  out.Add(NormalizeLogits(up), NormalizeLogits(agrees ? up : down), 0);
  out.Add(NormalizeLogits(up), NormalizeLogits(up), 0);
  return out;
}

// Full finds the first two of three keys; oracle finds both, scout the second.
QualityResult Measured() {
  QualityResult result;
  result.context = 512;
  result.policies = {{"full", 1, {{"a", "news", DistanceWith(true)}}},
                     {"scout", 0.25, {{"a", "news", DistanceWith(false)}}},
                     {"oracle", 0.25, {{"a", "news", DistanceWith(true)}}}};
  result.passkeys = {{"p0",
                      "news",
                      "single",
                      100,
                      0.5,
                      true,
                      6,
                      {{0, 0, true, 6}, {1, 32, false, 2, Blame::kCpu}, {2, 32, true, 6}}},
                     {"p1",
                      "code",
                      "multi",
                      200,
                      0.1,
                      true,
                      6,
                      {{0, 0, true, 6}, {1, 64, true, 6}, {2, 64, true, 6}}},
                     {"p2", "code", "single", 200, 0.9, false, 3, {}}};
  return result;
}

TEST_CASE("a key that full does not find does not count, and a lost one has its reason") {
  const std::string text = QualityText(Measured());
  CHECK_THAT(text, Contains("full finds 2 of 3"));
  // Found of all, of news and code, of single and multi; then the reasons.
  CHECK_THAT(text, Contains("scout                       25%     1/2 |      0/1      1/1 |"
                            "      0/1      1/1 |      0      0      0      1      0"));
}

TEST_CASE("the JSON of quality has the differences to oracle and every case") {
  Report report;
  AddQuality(Measured(), &report);
  const nlohmann::json& scout = report.details["quality"][1];
  CHECK(scout["policy"] == "scout");
  CHECK(scout["budget_share"] == 0.25);
  CHECK(scout["top1_agreement"] == 0.5);
  CHECK(scout["top1_below_oracle"] == 0.5);
  CHECK(scout["perplexity_over_oracle"].get<double>() > 0);
  CHECK(scout["texts"][0]["kind"] == "news");
  CHECK_FALSE(report.details["quality"][0].contains("top1_below_oracle"));  // full has no budget
  const nlohmann::json& lost = report.details["passkeys"][0]["policies"][1];
  CHECK(lost["found"] == false);
  CHECK(lost["right"] == 2);
  CHECK(lost["budget_tokens"] == 32);
  CHECK(lost["blame"] == "cpu");
  CHECK(report.details["passkeys"][2]["full"] == false);
  CHECK(report.details["passkeys"][2]["full_right"] == 3);
  CHECK(report.figures[1].name == "top-1 agreement with full, full, budget -, context 512");
  CHECK(report.figures[2].name == "pass keys found, scout, budget 25%");
  CHECK(report.figures[2].median == 0.5);
}

TEST_CASE("a run of pass keys alone has no table of texts, and the reverse") {
  QualityResult keys = Measured();
  for (PolicyQuality& quality : keys.policies) quality.texts.clear();
  CHECK_THAT(QualityText(keys), !Contains("perpl."));
  Report report;
  AddQuality(keys, &report);
  CHECK_FALSE(report.details.contains("quality"));
  QualityResult texts = Measured();
  texts.passkeys.clear();
  CHECK_THAT(QualityText(texts), !Contains("pass keys"));
}

TEST_CASE("a progress bar fills, and says what is left once something is done") {
  CHECK_THAT(ProgressBar(0, absl::Seconds(5)), Contains("  0%") && !Contains("left"));
  CHECK_THAT(ProgressBar(0.5, absl::Seconds(30)),
             Contains("[============            ]  50%, 30 s left"));
}

}  // namespace
}  // namespace sluice::bench
