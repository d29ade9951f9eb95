#include "src/bench/policies/quality.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "src/bench/harness/policy_choice.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/policies/policies_report.h"
#include "src/bench/policies/policy_quality.h"

namespace sluice::bench {
namespace {

StepLogits Of(std::vector<float> logits) { return NormalizeLogits(logits); }

TEST_CASE("logits become log-probabilities, and the lowest of equals is on top") {
  const StepLogits step = Of({1.0f, 3.0f, 3.0f, -200.0f});
  CHECK(step.top == 1);
  double sum = 0;
  for (const float p : step.log_probabilities) sum += std::exp(double{p});
  CHECK(sum == Approx(1).epsilon(1e-6));
  CHECK(step.log_probabilities[1] - step.log_probabilities[0] == Approx(2).epsilon(1e-6));
  // Large logits do not overflow.
  CHECK(Of({1000.0f, 1000.0f}).log_probabilities[0] == Approx(std::log(0.5)));
}

TEST_CASE("the distance of a policy from itself is nothing") {
  Distance d;
  for (int i = 0; i < 3; ++i) d.Add(Of({0.5f, -1, 2}), Of({0.5f, -1, 2}), i);
  CHECK(d.steps() == 3);
  CHECK(d.top1_agreement() == 1);
  CHECK(d.mean_kl() == 0);
  CHECK(d.perplexity_change() == 0);
}

TEST_CASE("agreement, KL and perplexity are what their formulas say") {
  Distance d;
  // p = (3/4, 1/4), q = (1/4, 3/4); the text goes on with token 0, then agrees.
  const StepLogits p = Of({std::log(3.0f), 0}), q = Of({0, std::log(3.0f)});
  d.Add(p, q, 0);
  d.Add(p, p, 1);
  CHECK(d.top1_agreement() == 0.5);
  const double kl = 0.75 * std::log(3.0) + 0.25 * std::log(1.0 / 3);
  CHECK(d.mean_kl() == Approx(kl / 2).epsilon(1e-6));
  CHECK(d.perplexity() == Approx(std::sqrt(4.0 * 4.0)).epsilon(1e-6));
  CHECK(d.reference_perplexity() == Approx(std::sqrt(4.0 / 3 * 4)).epsilon(1e-6));
  Distance twice = d;
  twice.Add(d);
  CHECK(twice.steps() == 4);
  CHECK(twice.mean_kl() == Approx(d.mean_kl()));
  CHECK(twice.perplexity() == Approx(d.perplexity()));
}

TEST_CASE("a file of texts reads back, and a wrong one is refused with a reason") {
  const std::string good = R"({"schema": "sluice-texts/2",
    "texts": [{"name": "a", "kind": "news", "ids": [1, 2, 3]}],
    "passkeys": [{"name": "b", "kind": "code", "variant": "multi", "depth": 0.25, "ids": [4],
                  "answer": [5, 6]}]})";
  const auto texts = ParseQualityTexts(good, 7);
  REQUIRE(texts.ok());
  CHECK(texts->texts[0].ids == std::vector<int32_t>{1, 2, 3});
  CHECK(texts->texts[0].kind == "news");
  CHECK(texts->passkeys[0].kind == "code");
  CHECK(texts->passkeys[0].variant == "multi");
  CHECK(texts->passkeys[0].depth == 0.25);
  CHECK(texts->passkeys[0].answer == std::vector<int32_t>{5, 6});
  CHECK(ParseQualityTexts("{}", 7).status().message().find("sluice-texts/2") !=
        absl::string_view::npos);
  // An id past the vocabulary, and a missing field.
  CHECK(ParseQualityTexts(good, 6).status().code() == absl::StatusCode::kInvalidArgument);
  const auto bare = ParseQualityTexts(R"({"schema": "sluice-texts/2", "texts": []})", 7);
  CHECK(bare.status().message().find("passkeys") != absl::string_view::npos);
}

TEST_CASE("policies are named, once each, and a wrong name meets the nearest") {
  CHECK(*ParsePolicies("scout,full") == std::vector<std::string>{"scout", "full"});
  CHECK(ParsePolicies("scot").status().message().find("scout") != absl::string_view::npos);
  CHECK_FALSE(ParsePolicies("full,full").ok());
  CHECK_FALSE(ParsePolicies("").ok());
  const PolicyOptions fetch_all = WithPolicy({}, "recall-fetch-all");
  CHECK(fetch_all.name == "recall");
  CHECK(fetch_all.recall.fetch_all);
  CHECK_FALSE(WithPolicy({}, "recall").recall.fetch_all);
  const PolicyOptions paper = WithPolicy({}, "recall-paper");
  CHECK(paper.name == "recall");
  CHECK(paper.recall.fetch_all);
  CHECK_FALSE(paper.recall.drift);
  CHECK(paper.recall.margin == 4.5f);
  CHECK(paper.rehearsals == 0);
  CHECK(WithPolicy({}, "scout-paper").rehearsals == 0);
  CHECK(WithPolicy({}, "scout").rehearsals == 1);
  CHECK(WithPolicy({}, "scout:rehearsals=2").rehearsals == 2);
  CHECK_FALSE(ParsePolicies("oracle:rehearsals=1").ok());
  CHECK(WithPolicy({}, "scout:shortlist=512").scout.shortlist_tokens == 512);
  CHECK_FALSE(ParsePolicies("scout:shortlist=0").ok());
  CHECK(WithPolicy({}, "recall-paper:margin=0").recall.margin == 0);
  CHECK(WithPolicy({}, "ends").oracle.selector == PolicyOptions::Oracle::Selector::kEnds);
  CHECK(WithPolicy({}, "random").oracle.selector == PolicyOptions::Oracle::Selector::kRandom);
}

TEST_CASE("a budget is a share of the context in whole blocks") {
  CHECK(QualityBudget(2048, 0.25, 32) == 512);
  CHECK(QualityBudget(2047, 0.25, 32) == 480);
  CHECK(QualityBudget(64, 0.25, 32) == 128);
}

TEST_CASE("a run's shares leave out layers that select nothing") {
  PolicyRun run;
  run.batch = 2;
  run.kv_heads = 2;
  run.budget_tokens = 100;
  run.statistics.layers.resize(3);  // The first is dense.
  run.statistics.layers[0].steps = 10;
  auto set = [&](size_t i, int64_t missing, int64_t recalls) {
    auto& layer = run.statistics.layers[i];
    layer.steps = 10;
    layer.selected = 2000;
    layer.missing = missing;
    layer.recalls = recalls;
    layer.link_bytes = 500;
  };
  set(1, 200, 1);
  set(2, 100, 3);
  CHECK(run.CpuShare() == Approx((0.1 + 0.05) / 2));
  CHECK(run.HitRate() == Approx(1 - 300.0 / 4000));
  CHECK(run.RecallInterval() == Approx(20.0 / 4));
  // Where heads look up what they selected, it is lookups per miss, also in a layer without one.
  PolicyRun looks = run;
  looks.statistics.layers[0].lookups = 100;
  looks.statistics.layers[0].misses = 8;
  looks.statistics.layers[1].lookups = 100;
  looks.statistics.layers[1].misses = 0;
  looks.statistics.layers.resize(2);
  CHECK(looks.RecallInterval() == Approx(200.0 / 8));
  CHECK(run.LinkBytesPerStep() == Approx(1000.0 * 2 / 10));
  run.statistics.layers.clear();
  CHECK(run.CpuShare() == 0);
  CHECK(run.HitRate() == 1);
  CHECK(run.RecallInterval() == 0);
}

TEST_CASE("idle is what no kernel covers inside the trace") {
  const absl::Time start = absl::FromUnixSeconds(100);
  StepTrace trace;
  trace.begin = start;
  trace.end = start + absl::Seconds(10);
  CHECK(IdleShare(trace) == 1);
  const auto add = [&](TraceSlice::Kind kind, uint32_t stream, int from, int to) {
    TraceSlice slice;
    slice.kind = kind;
    slice.stream = stream;
    slice.begin = start + absl::Seconds(from);
    slice.end = start + absl::Seconds(to);
    trace.device.push_back(slice);
  };
  add(TraceSlice::Kind::kKernel, 0, 1, 4);
  add(TraceSlice::Kind::kKernel, 1, 3, 5);  // Beside it: counted once.
  add(TraceSlice::Kind::kCopy, 2, 5, 7);    // Not a kernel.
  add(TraceSlice::Kind::kKernel, 3, 5, 6);  // Not a kernel of the model.
  trace.device.back().name = "TransferKernel";
  add(TraceSlice::Kind::kKernel, 0, 8, 15);  // Beyond the end.
  CHECK(IdleShare(trace) == Approx(0.4));
  add(TraceSlice::Kind::kKernel, 4, 0, 10);  // Of a sequence that is being warmed up.
  trace.device.back().name = "AnchorWalkKernel<__nv_bfloat16>";
  CHECK(IdleShare(trace) == Approx(0.4));
  add(TraceSlice::Kind::kKernel, 5, 6, 7);  // Attention over the link, beside the workers.
  trace.device.back().name = "ListKernel<128, 1, true, 2>";
  CHECK(IdleShare(trace) == Approx(0.3));
}

TEST_CASE("workers are busy for their share of the time of all of them") {
  PolicyRun run;
  CHECK(run.WorkersBusy() == 0);
  run.workers.workers = 4;
  CHECK(run.WorkersBusy() == 0);  // Nothing was counted.
  run.counted = absl::Seconds(5);
  run.workers.busy = absl::Seconds(15);
  CHECK(run.WorkersBusy() == Approx(0.75));
  CHECK(RunJson(run).at("workers_busy_share").get<double>() == Approx(0.75));
  CHECK(RunLine(run).find("75.0%") != std::string::npos);
}

TEST_CASE("percentiles of gaps") {
  CHECK(Percentile({}, 0.5) == 0);
  CHECK(Percentile({3, 1, 2}, 0.5) == 2);
  std::vector<double> hundred;
  for (int i = 1; i <= 101; ++i) hundred.push_back(i);
  CHECK(Percentile(hundred, 0.99) == 100);
}

TEST_CASE("the JSON of a run has its figures and its layers") {
  PolicyRun run;
  run.policy = "scout";
  run.batch = 4;
  run.context = 512;
  run.step.median = 0.5;
  run.kv_heads = 1;
  run.budget_tokens = 10;
  run.statistics.layers.resize(2);
  run.largest = true;
  const nlohmann::json j = RunJson(run);
  CHECK(j["policy"] == "scout");
  CHECK(j["largest"] == true);
  CHECK(j["tokens_per_second"] == 8.0);
  CHECK(j["layers"].size() == 2);
}

}  // namespace
}  // namespace sluice::bench
