// Tests how `sluice-bench policies` reads names and evaluates bytes and traces.
#include <array>
#include <catch2/catch.hpp>
#include <set>

#include "src/bench/harness/policy_choice.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/harness/synthetic_predictor.h"
#include "src/bench/policies/auto_run.h"
#include "src/bench/policies/policies_report.h"
#include "src/bench/trace/layer_timeline.h"
#include "src/model/step_traffic.h"

namespace sluice::bench {
namespace {

TEST_CASE("a policy's name may carry settings of that policy") {
  CHECK(ParsePolicies("hgca:beta=0.5:window=512,hgca:beta=1").ok());
  const auto why = [](const char* text) {
    return std::string(ParsePolicies(text).status().message());
  };
  CHECK(why("hgca:bet=1").find("beta") != std::string::npos);
  CHECK(why("scout:beta=1").find("policy scout has no 'beta'") != std::string::npos);
  CHECK_FALSE(ParsePolicies("full:budget=512").ok());
  CHECK_FALSE(ParsePolicies("ess:budget=512").ok());  // The model determines the number.
  CHECK_FALSE(ParsePolicies("offload-naive:reduction=1").ok());
  CHECK_FALSE(ParsePolicies("full:ratio=0.2").ok());
  CHECK(ParsePolicies("ess:ratio=0.2:least=64,offload-naive:ratio=0.2:movers=4").ok());
  CHECK_FALSE(ParsePolicies("scout:budget=0").ok());
  CHECK_FALSE(ParsePolicies("scout:budget=1.5").ok());
  CHECK_FALSE(ParsePolicies("scout:budget=120%").ok());
  CHECK_FALSE(ParsePolicies("hgca:beta=few").ok());
  CHECK_FALSE(ParsePolicies("hgca:beta=-1").ok());
  PolicyOptions options;
  options.max_context = 1000;
  CHECK(WithPolicy(options, "recall:budget=20%").budget_tokens == 200);
  CHECK(WithPolicy(options, "scout:budget=96").budget_tokens == 96);
  const PolicyOptions hgca = WithPolicy(options, "hgca:beta=0.5:window=128");
  CHECK(hgca.hgca.beta == 0.5f);
  CHECK(hgca.hgca.window_tokens == 128);
  CHECK(WithPolicy(options, "scout").scout.layer_ahead);
  CHECK(WithPolicy(options, "scout").scout.recall);
  CHECK_FALSE(WithPolicy(options, "scout-no-ahead").scout.layer_ahead);
  CHECK_FALSE(WithPolicy(options, "scout-no-recall").scout.recall);
  CHECK_FALSE(WithPolicy(options, "scout-no-ahead-no-recall").scout.layer_ahead);
  CHECK_FALSE(WithPolicy(options, "scout-no-ahead-no-recall").scout.recall);
  CHECK(WithPolicy(options, "hgca-mean").name == "hgca");
  CHECK(WithPolicy(options, "clo").clo.mover == PolicyOptions::Mover::kUva);
  const PolicyOptions gathers = WithPolicy(options, "clo:mover=cpu:mover-workers=6");
  CHECK(gathers.clo.mover == PolicyOptions::Mover::kCpu);
  CHECK(gathers.clo.mover_workers == 6);
  CHECK_FALSE(ParsePolicies("clo:mover-workers=0").ok());
  CHECK_FALSE(ParsePolicies("recall:mover=cpu").ok());
  CHECK_FALSE(ParsePolicies("clo:mover=auto").ok());
  const PolicyOptions latent = WithPolicy(options, "ess:mover=auto:mover-workers=7");
  CHECK(latent.ess.mover == PolicyOptions::Mover::kAuto);
  CHECK(latent.workers == 7);
  CHECK(WithPolicy(options, "offload-naive:mover=cpu").ess.mover == PolicyOptions::Mover::kCpu);
  const PolicyOptions fixed = WithPolicy(options, "fluxion-fixed:hot=1:device-share=0.25");
  CHECK(fixed.fluxion.fixed_block == 16);
  CHECK(fixed.fluxion.resident);
  CHECK(fixed.fluxion.device_share == 0.25);
  CHECK_FALSE(fixed.fluxion.digests_in_dram);
  CHECK_FALSE(WithPolicy(options, "fluxion-hbm-digests").fluxion.resident);
  CHECK_FALSE(WithPolicy(options, "fluxion-hbm-digests").fluxion.digests_in_dram);
  CHECK(WithPolicy(options, "fluxion-hbm-digests:host-digests=1").fluxion.digests_in_dram);
  for (const std::string name : {"fluxion-paper", "fluxion-paper-fixed"}) {
    const PolicyOptions published = WithPolicy(options, name);
    CHECK(published.fluxion.digests_in_dram);
    CHECK_FALSE(published.fluxion.resident);
    CHECK(published.fluxion.fixed_block == (name == "fluxion-paper" ? 0 : 16));
    CHECK(published.fluxion.fixed_share == 0.05);
    CHECK_FALSE(WithPolicy(options, name + ":host-digests=0").fluxion.digests_in_dram);
  }
  using Division = PolicyOptions::Fluxion::Division;
  const PolicyOptions alone = WithPolicy(options, "fluxion-fixed:schedule=none");
  CHECK(alone.fluxion.device_share == 0);
  CHECK(alone.fluxion.division == Division::kEachList);
  CHECK(WithPolicy(options, "fluxion:schedule=uniform").fluxion.division == Division::kHeads);
  CHECK(WithPolicy(options, "fluxion:schedule=length").fluxion.division == Division::kLengths);
  const PolicyOptions parts = WithPolicy(options, "fluxion:device-share=0.25:schedule=parts");
  CHECK(parts.fluxion.division == Division::kEachList);
  CHECK(parts.fluxion.device_share == 0.25);
  CHECK(why("fluxion:schedule=1").find("none, uniform, length, parts") != std::string::npos);
  CHECK_FALSE(ParsePolicies("scout:schedule=none").ok());
  CHECK(ParsePolicies("fluxion-synthetic:streaming=0:level=32").ok());
  CHECK_FALSE(ParsePolicies("fluxion-synthetic:level=48").ok());
  CHECK_FALSE(ParsePolicies("fluxion:level=32").ok());  // a network of its own has levels
  CHECK_FALSE(ParsePolicies("scout:host-digests=1").ok());
  CHECK_FALSE(ParsePolicies("clo:device-share=1").ok());
  CHECK(IsAuto("auto"));
  CHECK_FALSE(ParsePolicies("auto:budget=512").ok());  // A node chooses the budget.
  CHECK(WantsMeanSelection("hgca-mean:window=64"));
  CHECK_FALSE(WantsMeanSelection("hgca"));
}

TEST_CASE("a synthetic predictor has the volume that is asked for, and heads that differ") {
  SyntheticPredictorOptions options;
  options.layers = 8;
  options.heads = 32;
  options.kv_heads = 8;
  options.tokens = 16384;
  const auto predictor = SyntheticPredictor(options);
  CHECK(ValidFluxionPredictor(*predictor, "made").ok());
  CHECK(predictor->parameters() > 100'000);
  const double fixed = SyntheticVolume(*predictor, options, options.fixed_share);
  CHECK(fixed / SyntheticVolume(*predictor, options) == Approx(3.1).epsilon(0.02));
  int streaming = 0;
  std::set<float> budgets;
  for (int layer = 0; layer < options.layers; ++layer) {
    for (int head = 0; head < options.heads; ++head) {
      std::array<float, kernels::kFluxionFeatures> features = {};
      features[0] = static_cast<float>(layer);
      features[1] = static_cast<float>(head);
      features[34] = 0.6f;
      const FluxionPredictor::Head told = predictor->Predict(features);
      streaming += told.streaming ? 1 : 0;
      budgets.insert(told.budgets[1]);
      features[34] = 0.9f;  // another row
      CHECK(predictor->Predict(features).budgets != told.budgets);
    }
  }
  CHECK(streaming == Approx(0.6 * 8 * 32).epsilon(0.02));
  CHECK(budgets.size() > 200);
}

TEST_CASE("parts of a synthetic predictor are taken away, and budgets stay") {
  SyntheticPredictorOptions options;
  options.layers = 4;
  options.heads = 16;
  options.kv_heads = 4;
  options.tokens = 16384;
  const auto whole = SyntheticPredictor(options);
  const auto reading = WithoutStreaming(*whole);
  const auto large = AtOneLevel(*whole, 2);
  CHECK(ValidFluxionPredictor(*reading, "made").ok());
  CHECK(ValidFluxionPredictor(*large, "made").ok());
  for (int layer = 0; layer < options.layers; ++layer) {
    for (int head = 0; head < options.heads; ++head) {
      std::array<float, kernels::kFluxionFeatures> features = {};
      features[0] = static_cast<float>(layer);
      features[1] = static_cast<float>(head);
      features[34] = 0.6f;
      const FluxionPredictor::Head told = whole->Predict(features);
      CHECK_FALSE(reading->Predict(features).streaming);
      CHECK(reading->Predict(features).budgets == told.budgets);
      const FluxionPredictor::Head one = large->Predict(features);
      CHECK(one.streaming == told.streaming);
      CHECK(one.budgets[2] == told.budgets[2]);
      CHECK((one.budgets[0] == 1 && one.budgets[1] == 1 && one.budgets[3] == 1));
    }
  }
  // The choice of sizes and the skipping of heads both make the volume smaller.
  CHECK(SyntheticVolume(*large, options) > SyntheticVolume(*whole, options));
  CHECK(SyntheticVolume(*AtOneLevel(*whole, 0), options) > SyntheticVolume(*whole, options));
  CHECK(SyntheticVolume(*reading, options) > SyntheticVolume(*whole, options));
}

TEST_CASE("the floor of a step is its longest memory's") {
  MemoryTraffic rates;
  rates.hbm = 100;
  rates.to_device = rates.to_host = 10;
  rates.dram = 20;
  const auto floor = [&](double hbm, double to_device, double to_host, double dram) {
    return FloorOf({hbm, to_device, to_host, dram}, rates);
  };
  CHECK(floor(1000, 50, 50, 50).seconds == Approx(10));
  CHECK(floor(1000, 50, 50, 50).bound == "HBM");
  CHECK(floor(1000, 90, 120, 50).seconds == Approx(12));  // Each direction by itself.
  CHECK(floor(1000, 90, 120, 50).bound == "link");
  CHECK(floor(1000, 90, 0, 300).seconds == Approx(15));
  CHECK(floor(1000, 90, 0, 300).bound == "DRAM");
}

TEST_CASE("a run is compared with full at its largest batch") {
  MemoryTraffic rates;
  rates.hbm = rates.to_device = rates.to_host = rates.dram = 100;
  PolicyRun full, run;
  full.batch = 2;
  full.step.median = 20;
  full.step_bytes.hbm = 1000;  // Floor 10: 0.2 tokens/s, 0.1 measured.
  run.batch = 10;
  run.step.median = 25;       // 0.4 tokens/s.
  run.step_bytes.hbm = 2000;  // Floor 20: 0.5 tokens/s.
  const nlohmann::json j = FloorJson(run, rates, &full);
  CHECK(j["over_full"].get<double>() == Approx(4));
  CHECK(j["floors_over_full"].get<double>() == Approx(2.5));
  CHECK(j["of_floor_ratio"].get<double>() == Approx(1.6));
  CHECK(j["of_floor"].get<double>() == Approx(0.8));
  CHECK_FALSE(FloorJson(run, rates, nullptr).contains("over_full"));
}

TEST_CASE("auto is compared with the best of the policies of its quality") {
  AutoRun taken;
  taken.ask = {Quality::kHigh, 10, 65536, 40};
  taken.name = "scout:budget=8192";
  for (const char* policy : {"full", "scout", "recall"}) {
    taken.candidates.emplace_back().of.policy = policy;
  }
  taken.candidates[1].of.budget_tokens = 8192;
  taken.choice.verdicts.resize(3);
  taken.choice.verdicts[1].tokens_per_second = 95;
  taken.choice.taken = 1;
  std::vector<PolicyRun> runs;
  const auto run = [&](const char* policy, int64_t budget, int batch, bool largest) {
    PolicyRun& made = runs.emplace_back();
    made.policy = policy;
    made.budget_tokens = budget;
    made.context = 65536;
    made.batch = batch;
    made.largest = largest;
    made.step.median = 0.1;  // Ten tokens/s of each sequence.
  };
  run("auto", 8192, 9, true);
  CHECK(AutoDistanceText(taken, runs).empty());
  run("full", 2048, 2, true);
  run("scout", 2048, 20, true);    // Its budget is too small.
  run("oracle", 16384, 30, true);  // No node takes it.
  run("scout:budget=16384", 16384, 10, true);
  run("recall:budget=16384", 16384, 40, false);
  CHECK(AutoJson(taken, runs)["of_best"].get<double>() == Approx(0.9));
  CHECK(AutoJson(taken, runs)["best"] == "scout:budget=16384");
  CHECK_FALSE(AutoJson(taken, runs)["took_the_best"].get<bool>());
  CHECK_THAT(AutoDistanceText(taken, runs), Catch::Contains("MORE THAN 5 % BELOW IT"));
  taken.candidates[1].of.budget_tokens = 16384;
  CHECK(AutoJson(taken, runs)["took_the_best"].get<bool>());
  CHECK_THAT(AutoDistanceText(taken, runs), Catch::Contains("the same policy"));
  taken.ask.quality = Quality::kExact;
  CHECK(AutoJson(taken, runs)["of_best"].get<double>() == Approx(4.5));
}

TEST_CASE("a timeline shows three layers from what each begins with") {
  const absl::Time start = absl::FromUnixSeconds(100);
  StepTrace trace;
  trace.steps = 2;
  const auto add = [&](const char* name, uint32_t stream, int from, int to) {
    TraceSlice slice;
    slice.name = name;
    slice.stream = stream;
    slice.begin = start + absl::Seconds(from);
    slice.end = start + absl::Seconds(to);
    trace.device.push_back(slice);
  };
  constexpr int kLayers = 4;
  for (int i = 0; i < 2 * kLayers; ++i) {
    add("Norm", 1, 10 * i, 10 * i + 1);
    add("Norm", 1, 10 * i + 5, 10 * i + 6);  // Twice per layer.
    add("Append", 1, 10 * i + 2, 10 * i + 5);
    add("Attend", 2, 10 * i + 4, 10 * i + 8);
  }
  const nlohmann::json j = LayerTimeline(trace, kLayers);
  CHECK(j["anchor"] == "Append");
  CHECK(j["layer_seconds"]["median"].get<double>() == Approx(10));
  CHECK(j["slices"].size() == 3 * 4);
  for (const auto& slice : j["slices"]) {
    CHECK(slice["end"].get<double>() > 0);
    CHECK(slice["begin"].get<double>() < 30);
  }
  CHECK(LayerTimeline(StepTrace(), kLayers).is_null());
}

}  // namespace
}  // namespace sluice::bench
