// Tests which policy auto takes, as a function of what is asked for, the rates and a plan; and the
// forecasts that it compares.
#include "src/model/policy_auto.h"

#include <catch2/catch.hpp>

#include "src/model/policy_forecast.h"
#include "src/model/step_traffic.h"

namespace sluice {
namespace {

constexpr double kGB = 1e9;

// What an H200 and its host were measured at (policies/speed.md).
DeviceRates Rates() {
  DeviceRates rates;
  rates.memory = {4290 * kGB, 55 * kGB, 55 * kGB, 116 * kGB};
  rates.operator_seconds = 2e-6;
  return rates;
}

AutoCandidate Candidate(const char* policy, int64_t budget, int64_t running, double hbm_gb,
                        double dram_gb = 0) {
  AutoCandidate c;
  c.of = {policy, budget};
  c.running = running;
  c.bytes = {hbm_gb * kGB, 0, 0, dram_gb * kGB};
  return c;
}

AutoAsk Ask(Quality quality, int64_t sequences, int64_t context = 65536) {
  return {quality, sequences, context, 40};
}

// 64K under a cap of two whole sequences: scout and recall run ten.
std::vector<AutoCandidate> Capped(int64_t budget) {
  return {Candidate("full", 0, 2, 49.5), Candidate("scout", budget, 10, 36.5, 0.3),
          Candidate("recall", budget, 10, 46.8)};
}

AutoChoice Chosen(const AutoAsk& ask, const std::vector<AutoCandidate>& candidates) {
  const auto choice = ChoosePolicy(ask, Rates(), candidates);
  INFO(choice.status());
  REQUIRE(choice.ok());
  return *choice;
}

CacheLayout KeysAndValues() {
  CacheKind kv;
  kv.name = "kv";
  kv.heads = 8;
  kv.SetEqualParts(2, 512);
  return {40, {kv}};
}

CacheLayout Latents(bool indexer) {
  CacheKind latent, index;
  latent.name = "latent";
  index.name = "index";
  return indexer ? CacheLayout{61, {latent, index}} : CacheLayout{61, {latent}};
}

TEST_CASE("forecasts are near the steps that an H200 was measured at") {
  struct Measured {
    const char* policy;
    double hbm_gb, dram_gb, step_ms;
  };
  // Qwen3-14B's geometry, 64K at batch 2, 10, 2 and 6, 8K at batch 8, and 64K at batch 8: bytes by
  // the formulas of step_traffic.h, times of policies/speed.md.
  for (const Measured& m : {Measured{"full", 49.5, 0, 13.6}, Measured{"scout", 37.3, 0.2, 12.27},
                            Measured{"scout", 31.5, 0.04, 9.61}, Measured{"recall", 48.2, 0, 22.5},
                            Measured{"full", 38.7, 0, 10.4}, Measured{"recall", 54.3, 0, 26.7}}) {
    const StepForecast step =
        ForecastStep(m.policy, {m.hbm_gb * kGB, 0, 0, m.dram_gb * kGB}, 40, Rates());
    INFO(m.policy << ", " << m.hbm_gb << " GB");
    CHECK(step.seconds * 1e3 == Approx(m.step_ms).epsilon(0.1));
    CHECK(step.bound == "HBM");
  }
}

TEST_CASE(
    "the memories of a device without its own share one rate, and hgca waits for its workers") {
  const MemoryTraffic bytes = {10 * kGB, 0, 0, 0.1 * kGB};
  DeviceRates rates = Rates();
  rates.operator_seconds = 0;
  const double apart = ForecastStep("scout", bytes, 1, rates).seconds;
  CHECK(apart == Approx(10 / rates.memory.hbm * kGB / 0.85));
  CHECK(ForecastStep("hgca", bytes, 1, rates).seconds ==
        Approx((10 / rates.memory.hbm + 0.1 / rates.memory.dram) * kGB / 0.60));
  rates.one_memory = true;
  CHECK(ForecastStep("scout", bytes, 1, rates).seconds == Approx(apart + 0.1 / 116 / 0.85));
  CHECK(ForecastStep("scout", {0, 0, 0, 1 * kGB}, 1, Rates()).bound == "DRAM");
}

TEST_CASE("a layer of scout waits for workers that begin once the layer before has looked ahead") {
  const MemoryTraffic bytes = {1 * kGB, 0, 0, 0.5 * kGB};
  const StepForecast step = ForecastStep("scout", bytes, 8, Rates());
  CHECK(step.seconds == Approx(8 * 170e-6 + 0.5 / 116));
  CHECK(step.bound == "DRAM");
  // Sequences that are in HBM whole have no workers to wait for.
  const MemoryTraffic whole = {20 * kGB, 0, 0, 0};
  CHECK(ForecastStep("scout", whole, 8, Rates()).bound == "HBM");
}

TEST_CASE("a sequence that fits its budget is expected to miss nothing") {
  PolicyOptions options;
  options.budget_tokens = 2048;
  options.dense_layers = 1;
  for (const char* policy : {"scout", "recall"}) {
    options.name = policy;
    INFO(policy);
    const PolicyStatistics fits = ExpectedStatistics(options, KeysAndValues(), 2048);
    REQUIRE(fits.layers.size() == 40);
    CHECK(fits.layers[0].selected == 0);  // dense
    CHECK(fits.layers[1].selected == fits.layers[1].steps * 8 * 2048);
    CHECK(fits.layers[1].missing == 0);
    CHECK(fits.layers[1].recalled == 0);
    const PolicyStatistics longer = ExpectedStatistics(options, KeysAndValues(), 65536);
    CHECK(longer.layers[1].selected == fits.layers[1].selected);
    CHECK(longer.layers[1].missing > 0);
    CHECK(longer.layers[1].HitRate() > 0.9);
  }
  options.name = "full";
  CHECK(ExpectedStatistics(options, KeysAndValues(), 65536).layers.empty());
}

TEST_CASE("a profile says how often scout is expected to recall, and what ess misses") {
  PolicyOptions options;
  options.name = "scout";
  options.dense_layers = 0;
  options.scout.intervals.assign(40, 2);
  const auto recalled = [&] {
    return ExpectedStatistics(options, KeysAndValues(), 65536).layers[3].recalled;
  };
  const int64_t often = recalled();
  options.scout.intervals.assign(40, 20);
  CHECK(often == Approx(10 * recalled()).epsilon(0.01));

  options.name = "ess";
  options.index_top_k = 2048;
  const CacheLayout latents = Latents(true);
  const auto without = ExpectedStatistics(options, latents, 32768).layers[5];
  CHECK(without.missing < without.selected / 10);
  options.ess.profile.points.push_back({32768, 0.2, 8, std::vector<double>(61, 700)});
  const auto with = ExpectedStatistics(options, latents, 32768).layers[5];
  CHECK(static_cast<double>(with.missing) / static_cast<double>(with.steps) == Approx(700));
}

TEST_CASE("full is taken where all that is asked for fits, whatever is faster") {
  const std::vector<AutoCandidate> all = {Candidate("full", 0, 8, 114),
                                          Candidate("scout", 16384, 8, 40)};
  for (const Quality quality : {Quality::kExact, Quality::kHigh}) {
    const AutoChoice choice = Chosen(Ask(quality, 8), all);
    CHECK(all[choice.taken].of.policy == "full");
    CHECK_THAT(choice.why, Catch::Contains("holds all"));
    CHECK(choice.verdicts[1].tokens_per_second > choice.verdicts[0].tokens_per_second);
    CHECK(choice.verdicts[1].reason != choice.verdicts[0].reason);
  }
  // Quality fast asks for speed.
  const AutoChoice fast = Chosen(Ask(Quality::kFast, 8), all);
  CHECK(all[fast.taken].of.policy == "scout");
  // Two sequences of 2K: predicting queries costs more than their caches.
  const std::vector<AutoCandidate> few = {Candidate("full", 0, 2, 28.7),
                                          Candidate("scout", 2048, 2, 30.7)};
  const AutoChoice small = Chosen(Ask(Quality::kFast, 2, 2048), few);
  CHECK(few[small.taken].of.policy == "full");
}

TEST_CASE("where full holds too few, the fastest of the quality is taken") {
  const AutoChoice high = Chosen(Ask(Quality::kHigh, 10), Capped(8192));
  CHECK(Capped(8192)[high.taken].of.policy == "scout");
  CHECK_THAT(high.why, Catch::Contains("fastest of quality high"));
  CHECK_THAT(high.why, Catch::Contains("with 10 sequences at once"));
  CHECK_THAT(high.verdicts[0].reason, Catch::Contains("no faster"));
  CHECK_THAT(high.verdicts[2].reason, Catch::Contains("no faster"));
  // A thirty-second of the context is no budget of quality high.
  const AutoChoice little = Chosen(Ask(Quality::kHigh, 10), Capped(2048));
  CHECK(little.taken == 0);
  CHECK_THAT(little.verdicts[1].reason, Catch::Contains("not of quality high"));
  CHECK_THAT(little.why, Catch::Contains("2 of 10 sequences at a time"));
  CHECK(Chosen(Ask(Quality::kFast, 10), Capped(2048)).taken == 1);
  CHECK(Chosen(Ask(Quality::kExact, 10), Capped(8192)).taken == 0);
}

TEST_CASE(
    "of a policy's budgets the largest that holds all sequences is taken, else the smallest") {
  std::vector<AutoCandidate> all = {Candidate("full", 0, 2, 49.5), Candidate("scout", 16384, 6, 40),
                                    Candidate("scout", 13312, 10, 42),
                                    Candidate("scout", 8192, 10, 38)};
  AutoChoice choice = Chosen(Ask(Quality::kHigh, 10), all);
  CHECK(all[choice.taken].of.budget_tokens == 13312);
  CHECK_THAT(choice.verdicts[1].reason, Catch::Contains("a budget of 13312 holds 10 sequences"));
  CHECK_THAT(choice.verdicts[3].reason, Catch::Contains("a budget of 13312 holds as many"));
  all[2].running = 7;
  all[3].running = 8;
  choice = Chosen(Ask(Quality::kHigh, 10), all);
  CHECK(all[choice.taken].of.budget_tokens == 8192);
}

TEST_CASE("full remains where the settings refuse the others") {
  std::vector<AutoCandidate> all = Capped(8192);
  all[1].status = all[2].status = absl::InvalidArgumentError("overcommit: expected 1");
  const AutoChoice choice = Chosen(Ask(Quality::kHigh, 10), all);
  CHECK(choice.taken == 0);
  CHECK(choice.verdicts[1].reason == "refused: overcommit: expected 1");
  const std::string text = AutoText(Ask(Quality::kHigh, 10), Rates(), all, choice);
  CHECK_THAT(text,
             Catch::Contains("policy auto, quality high, 10 sequences of 65536 tokens: full"));
  CHECK_THAT(text, Catch::Contains("refused: overcommit"));
}

TEST_CASE("an error says what to change where no candidate holds a sequence") {
  std::vector<AutoCandidate> all = {Candidate("full", 0, 0, 0), Candidate("scout", 8192, 3, 30)};
  const auto refused = ChoosePolicy(Ask(Quality::kExact, 4), Rates(), all);
  CHECK(refused.status().code() == absl::StatusCode::kFailedPrecondition);
  const std::string why(refused.status().message());
  CHECK_THAT(why, Catch::StartsWith("policy: auto with quality exact"));
  CHECK_THAT(why, Catch::Contains("full: HBM and DRAM hold no sequence of 65536 tokens"));
  CHECK_THAT(why, Catch::Contains("lower max_context"));
  CHECK_THAT(why, Catch::Contains("allow a lower quality"));
  CHECK(Chosen(Ask(Quality::kHigh, 4), all).taken == 1);
}

TEST_CASE("on a device without its own memory another policy has to promise twice as much") {
  DeviceRates rates = Rates();
  rates.one_memory = true;
  std::vector<AutoCandidate> all = {Candidate("full", 0, 4, 40), Candidate("scout", 8192, 8, 60)};
  CHECK(ChoosePolicy(Ask(Quality::kHigh, 8), rates, all)->taken == 0);
  all[1].bytes.hbm = 20 * kGB;
  CHECK(ChoosePolicy(Ask(Quality::kHigh, 8), rates, all)->taken == 1);
}

TEST_CASE("the candidates of a quality are those that the model's caches allow") {
  const auto names = [](Quality quality, const CacheLayout& layout, int64_t context = 65536) {
    std::string out;
    for (const PolicyAndBudget& of : AutoCandidates(quality, layout, context, 2048)) {
      out += of.policy + ":" + std::to_string(of.budget_tokens) + " ";
    }
    return out;
  };
  CHECK(names(Quality::kExact, KeysAndValues()) == "full:0 ");
  CHECK(names(Quality::kFast, KeysAndValues()) == "full:0 scout:2048 recall:2048 hgca:0 ");
  CHECK(names(Quality::kHigh, KeysAndValues()) ==
        "full:0 scout:16384 scout:13312 scout:10496 scout:8192 "
        "recall:16384 recall:13312 recall:10496 recall:8192 ");
  // No budget is below budget_tokens.
  CHECK(names(Quality::kHigh, KeysAndValues(), 4096) == "full:0 scout:2048 recall:2048 ");
  for (const Quality quality : {Quality::kExact, Quality::kHigh, Quality::kFast}) {
    CHECK(names(quality, Latents(true)) == "full:0 ess:0 ");
    CHECK(names(quality, Latents(false)) == "full:0 ");
    for (const PolicyAndBudget& of : AutoCandidates(quality, KeysAndValues(), 65536, 2048)) {
      CHECK(MeetsQuality(quality, of.policy, of.budget_tokens, 65536));
    }
    CHECK(QualityOf(QualityName(quality)) == quality);
  }
}

}  // namespace
}  // namespace sluice
