// Tests the measurement of policies on texts, with a tiny model: what is compared, how often a step
// may be computed, and which queries a policy is given.
#include "src/bench/policies/policy_quality.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "src/base/rng.h"
#include "src/bench/harness/query_watch.h"
#include "src/bench/policies/query_feed.h"
#include "src/bench/workload/dictation.h"
#include "src/device/cpu/cpu_device.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/or_fail.h"

namespace sluice::bench {
namespace {

constexpr int kContext = 384;

// Kernels that round to bf16 in their products (AMX) would hide small differences.
constexpr char kKernels[] = "portable";

struct Bench {
  std::unique_ptr<Device> device = OrFail(NewCpuDevice({kKernels, 1}));
  std::unique_ptr<Model> model;
  std::unique_ptr<BenchTiers> tiers;
  PolicyWorld world;

  Bench() {
    Model::Options options;
    options.directory = fixtures::ModelDir("tiny-llama");
    options.block_tokens = 16;
    options.max_rows = 512 + 1;
    options.max_logits = 1;
    model = OrFail(Model::Load(options, device.get()));
    tiers = OrFail(BenchTiers::Create(*device, int64_t{16} << 20, int64_t{32} << 20));
    world.device = device.get();
    world.model = model.get();
    world.max_context = kContext + 16;
    world.options.dense_layers = 0;
    world.options.host_kernels = kernels::FindKernelTable(kKernels);
    REQUIRE(tiers->Cut(&world, "full").ok());
  }

  std::vector<int32_t> Tokens(int count, uint64_t seed) const {
    SplitMix64 random(seed);
    std::vector<int32_t> out;
    for (int i = 0; i < count; ++i) {
      out.push_back(
          static_cast<int32_t>(random.Below(static_cast<uint64_t>(model->config().vocab_size))));
    }
    return out;
  }
};

QualityTexts Texts(const Bench& bench) {
  QualityTexts texts;
  texts.texts = {{"first", "news", bench.Tokens(kContext + 20, 1)},
                 {"second", "code", bench.Tokens(kContext + 20, 2)},
                 {"short", "code", bench.Tokens(40, 3)}};
  texts.passkeys = {{"key", "news", "single", 0.5, bench.Tokens(200, 4), bench.Tokens(2, 5)}};
  return texts;
}

QualityOptions Options() {
  QualityOptions options;
  options.context = kContext;
  options.steps = 6;
  return options;
}

TEST_CASE("each policy is measured at each budget on each text that is long enough") {
  const Bench bench;
  std::vector<std::string> phases;
  double last = -1;
  const auto measure = [&] {
    last = -1;
    return OrFail(MeasureQuality(bench.world, {"full", "oracle", "scout:budget=50%"}, Texts(bench),
                                 Options(),
                                 [&](const std::string& phase, const std::string&, double done,
                                     const QualityResult& so_far) {
                                   CHECK(so_far.policies.size() == 4);
                                   phases.push_back(phase);
                                   CHECK(done >= last);
                                   last = done;
                                 }));
  };
  const QualityResult result = measure();
  REQUIRE(result.policies.size() == 4);
  CHECK(result.policies[0].budget_share == 1);
  CHECK(result.policies[1].budget_share == 0.125);
  CHECK(result.policies[2].budget_share == 0.25);
  for (const PolicyQuality& quality : result.policies) {
    REQUIRE(quality.texts.size() == 2);  // The short one is left out.
    CHECK(quality.texts[1].kind == "code");
    CHECK(quality.All().steps() == 12);
  }
  CHECK(result.policies[0].All().mean_kl() == 0);
  // A larger budget of exact blocks is nearer to full.
  CHECK(result.policies[2].All().mean_kl() < result.policies[1].All().mean_kl());
  CHECK(std::find(phases.begin(), phases.end(), "prompts") != phases.end());
  // Random weights do not know the answer, so nobody is asked.
  REQUIRE(result.passkeys.size() == 1);
  CHECK_FALSE(result.passkeys[0].full);
  CHECK(result.passkeys[0].outcomes.empty());

  const QualityResult again = measure();
  for (size_t i = 0; i < result.policies.size(); ++i) {
    CHECK(again.policies[i].All().mean_kl() == result.policies[i].All().mean_kl());
  }
}

TEST_CASE("a key that full finds is asked of every policy, and a loss has a reason") {
  const Bench bench;
  QualityTexts texts = Texts(bench);
  texts.texts.clear();
  // The answer is what full says.
  {
    auto full = OrFail(SetUpPolicy(bench.world, "full"));
    const auto contexts =
        OrFail(ContextMaker::Create(kContext, bench.device.get(), bench.model.get()));
    const Context context = OrFail(contexts->Compute(texts.passkeys[0].ids));
    const auto dictation = OrFail(Dictation::Create(
        {bench.device.get(), bench.model.get(), full.get(), bench.world.dram, kContext}));
    REQUIRE(dictation->Begin(context, kContext).ok());
    for (int32_t& token : texts.passkeys[0].answer) {
      const absl::Span<const float> logits = OrFail(dictation->Step());
      token = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
      dictation->Append(token);
    }
  }
  QualityOptions options = Options();
  options.texts = 0;
  const QualityResult result = OrFail(
      MeasureQuality(bench.world, {"full", "random", "scout", "recall", "hgca"}, texts, options,
                     [](const std::string&, const std::string&, double, const QualityResult&) {}));
  const PasskeyCase& passkey = result.passkeys.front();
  REQUIRE(passkey.full);
  REQUIRE(passkey.outcomes.size() == 9);
  CHECK(passkey.outcomes[0].found);
  for (const PasskeyOutcome& outcome : passkey.outcomes) {
    CHECK(outcome.found == (outcome.blame == Blame::kNone));
    CHECK(outcome.found == (outcome.right == 2));
  }
  CHECK(passkey.outcomes[1].budget_tokens == 64);  // Four blocks at least.
}

TEST_CASE("the reason for a lost key follows from what helps") {
  //            real   settled both   oracle workers
  CHECK(BlameOf({true, true, false, true, true}) == Blame::kCpu);
  CHECK(BlameOf({true, true, false, true, false}) == Blame::kAge);
  CHECK(BlameOf({true, false, false, true, true}) == Blame::kQuery);
  CHECK(BlameOf({false, false, true, true, true}) == Blame::kQuery);
  CHECK(BlameOf({false, true, false, true, true}) == Blame::kAge);
  CHECK(BlameOf({false, false, false, true, true}) == Blame::kScore);
  CHECK(BlameOf({false, false, false, false, true}) == Blame::kBudget);
}

TEST_CASE("a policy is given the queries that were set, and its real ones stay") {
  const Bench bench;
  const ModelConfig& config = bench.model->config();
  const auto full = OrFail(SetUpPolicy(bench.world, "full"));
  const auto watch = OrFail(QueryWatch::Create(full.get(), config.layers, config.heads,
                                               config.head_dim, bench.device.get()));
  const auto feed = OrFail(QueryFeed::Create(watch.get(), config.layers, config.heads,
                                             config.head_dim, bench.device.get()));
  const auto contexts =
      OrFail(ContextMaker::Create(kContext, bench.device.get(), bench.model.get()));
  const Context context = OrFail(contexts->Compute(bench.Tokens(100, 9)));
  const auto dictation = OrFail(Dictation::Create(
      {bench.device.get(), bench.model.get(), feed.get(), bench.world.dram, kContext}));
  REQUIRE(dictation->Begin(context, kContext).ok());
  const auto size = static_cast<size_t>(config.heads * config.head_dim);
  std::vector<float> queries(static_cast<size_t>(config.layers) * size);
  for (size_t i = 0; i < queries.size(); ++i) queries[i] = static_cast<float>(i) + 0.5f;
  feed->Set(queries);
  REQUIRE(dictation->Step().ok());
  const auto layer_of = [](absl::Span<const float> row) {
    return std::vector<float>(row.begin(), row.end());
  };
  const std::vector<float> real = layer_of(watch->real(1));
  for (int layer = 0; layer < config.layers; ++layer) {
    const auto begin = queries.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(layer) * size);
    CHECK(layer_of(watch->predicted(layer)) ==
          std::vector<float>(begin, begin + static_cast<ptrdiff_t>(size)));
  }
  for (float& query : queries) query = 0;
  feed->Set(queries);
  REQUIRE(dictation->Step().ok());
  CHECK(layer_of(watch->real(1)) == real);
}

TEST_CASE(
    "a step that is computed again gives what full gives, where a policy attends to everything") {
  const Bench bench;
  const auto contexts =
      OrFail(ContextMaker::Create(kContext, bench.device.get(), bench.model.get()));
  const Context context = OrFail(contexts->Compute(bench.Tokens(kContext - 40, 11)));
  const std::vector<int32_t> next = bench.Tokens(20, 12);
  PolicyWorld world = bench.world;
  world.options.budget_tokens = kContext;
  world.options.hgca.window_tokens = 64;
  world.options.recall.margin = 1e9f;
  const auto run = [&](const char* name, int repeats) {
    const auto policy = OrFail(SetUpPolicy(world, name));
    const auto dictation = OrFail(Dictation::Create(
        {bench.device.get(), bench.model.get(), policy.get(), world.dram, world.max_context}));
    REQUIRE(dictation->Begin(context, kContext).ok());
    std::vector<StepLogits> out;
    for (const int32_t token : next) {
      absl::Span<const float> logits;
      for (int i = 0; i < repeats; ++i) logits = OrFail(dictation->Step());
      out.push_back(NormalizeLogits(logits));
      dictation->Append(token);
    }
    return out;
  };
  const std::vector<StepLogits> full = run("full", 1);
  for (const char* name : {"full", "scout:interval=1", "recall", "hgca:beta=0", "oracle"}) {
    INFO(name);
    const std::vector<StepLogits> again = run(name, 4);
    double worst = 0;
    for (size_t i = 0; i < full.size(); ++i) {
      for (size_t v = 0; v < full[i].log_probabilities.size(); ++v) {
        worst = std::max(worst, std::abs(double{full[i].log_probabilities[v]} -
                                         double{again[i].log_probabilities[v]}));
      }
    }
    CHECK(worst < 1e-2);
  }
}

}  // namespace
}  // namespace sluice::bench
