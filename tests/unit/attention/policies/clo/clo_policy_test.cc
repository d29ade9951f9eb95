#include "src/attention/policies/clo/clo_policy.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "src/model/step_traffic.h"
#include "tests/test_main.h"
#include "tests/unit/attention/policies/clo/clo_case.h"
#include "tests/unit/attention/policies/clo/naive_head.h"
#include "tests/unit/attention/policy_traffic.h"

namespace sluice {
namespace {

using testing::CheckAgainstNaive;
using testing::kRing;
using testing::kSink;
using testing::MakeClo;
using testing::NaiveCase;
using testing::PolicyRig;
using testing::RandomVectors;
using testing::SumsOf;
using testing::TurningQueries;

void TestNaive(const PolicyRig::Shape& of) {
  PolicyRig::Shape shape = of;
  const PolicyStatistics::Layer some = CheckAgainstNaive(shape, {96, 0, 300, 40});
  CHECK(some.misses * 20 > some.lookups);
  CHECK(some.misses * 2 < some.lookups);
  // A share of a long row is more than the budget.
  CheckAgainstNaive(shape, {80, 3, 400, 24});
  NaiveCase published{96, 0, 300, 24};
  published.as_hata = true;
  CheckAgainstNaive(shape, published);
  shape.heads = 6;
  shape.kv_heads = 1;
  CheckAgainstNaive(shape, {96, 4, 450, 24});
  shape.heads = 10;  // groups of five, as in Qwen3-14B
  shape.kv_heads = 2;
  shape.head_dim = 128;
  shape.block_tokens = 32;
  CheckAgainstNaive(shape, {96, 0, 333, 20});
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "a row attends to what each head selected for queries like its own, and to the ring", TestNaive)

void TestPersistentHeads(const PolicyRig::Shape& of, bool ahead) {
  PolicyRig::Shape shape = of;
  REQUIRE(shape.layers == 3);
  NaiveCase c{80, 3, 400, 24};
  c.ahead = ahead;
  // Layer 0 is persistent, one head of layer 1 is, and none of layer 2.
  c.persistent = {1, 1, 0, 1, 0, 0};
  const PolicyStatistics::Layer some = CheckAgainstNaive(shape, c);
  CHECK(some.lookups == int64_t{3} * c.steps);  // persistent heads look nothing up
  // Layer 2 comes after layer 0 now, and its heads select by their own queries.
  NaiveCase unpredictable = c;
  unpredictable.persistent = {1, 1, 0, 0, 1, 1};
  unpredictable.predicted = {1, 0.95f, 0.3f};
  CheckAgainstNaive(shape, unpredictable);
  shape.head_dim = 64;
  c.persistent = {1, 1, 0, 0, 1, 1};
  CheckAgainstNaive(shape, c);
  c.persistent = {1, 1, 1, 1, 1, 1};
  c.context = 90;  // shorter than what the ring and the budget hold
  const PolicyStatistics::Layer all = CheckAgainstNaive(shape, c);
  CHECK(all.lookups == 0);
  CHECK(all.recalled == 0);
  CHECK(all.selected == 0);
  CHECK(all.resident_selected > 0);
}
void TestPersistent(const PolicyRig::Shape& shape) { TestPersistentHeads(shape, false); }
void TestPersistentAhead(const PolicyRig::Shape& shape) { TestPersistentHeads(shape, true); }
SLUICE_TEST_ON_CPU_AND_GPU(
    "a persistent head selects by its own queries in every step, and fetches nothing",
    TestPersistent)
SLUICE_TEST_ON_CPU_AND_GPU("a persistent head may select by predicted queries", TestPersistentAhead)

void TestReplace(const PolicyRig::Shape& shape) {
  NaiveCase c{96, 4, 400, 24};
  const PolicyStatistics::Layer delta = CheckAgainstNaive(shape, c);
  c.refill = PolicyOptions::Clo::Refill::kReplace;
  const PolicyStatistics::Layer replace = CheckAgainstNaive(shape, c);
  // The same heads miss and select the same, and every selected token outside the ring is fetched.
  CHECK(replace.misses == delta.misses);
  CHECK(replace.selected == delta.selected);
  CHECK(replace.recalled == replace.selected - replace.misses * kRing);
  CHECK(replace.recalled > delta.recalled);
}
SLUICE_TEST_ON_CPU_AND_GPU("refill by replacement fetches all that a head selected", TestReplace)

// Where the prediction is right, it makes no difference to a bit of the result whether tokens are
// fetched in time, were kept, or have been in HBM all along.
void TestWhereTokensLie(const PolicyRig::Shape& shape) {
  const PolicyRig::Make random = RandomVectors(shape, 0);
  const uint64_t seed = TestSeed();
  const auto decode = [&](auto change) {
    PolicyRig rig(shape, random);
    PolicyOptions options = rig.Options();
    options.budget_tokens = 80;
    options.clo.reuse = false;
    change(options.clo);
    const auto policy = MakeClo(options);
    rig.Admit(*policy, 1, seed, 300, 330);
    testing::Decoded decoded;
    for (int step = 0; step < 20; ++step) testing::Add(decoded, rig.Step(*policy, {1}), 0);
    const PolicyStatistics::Layer sums = SumsOf(*policy);
    rig.Release(*policy, 1);
    return std::pair(decoded, sums.recalled);
  };
  const auto [hata, none] = decode([](PolicyOptions::Clo& clo) { clo.persistent_share = 1; });
  const auto [lru, some] = decode([](PolicyOptions::Clo& clo) { clo.resident_share = 0.5; });
  const auto [half, fewer] = decode([](PolicyOptions::Clo& clo) { clo.persistent_share = 0.5; });
  const auto [fetched, all] =
      decode([](PolicyOptions::Clo& clo) { clo.refill = PolicyOptions::Clo::Refill::kReplace; });
  CHECK(lru == hata);
  CHECK(half == hata);
  CHECK(fetched == hata);
  CHECK(none == 0);
  CHECK(some > 0);
  CHECK(fewer > 0);
  CHECK(all > some);
}
SLUICE_TEST_ON_CPU_AND_GPU("the bits of a row do not depend on where its tokens lay",
                           TestWhereTokensLie)

void TestNeverAndAlways(const PolicyRig::Shape& shape) {
  // Whatever can be compared hits: the first row selects, and nothing is fetched later.
  NaiveCase c{96, 0, 300, 20, /*refresh=*/false, /*similarity=*/-1};
  const PolicyStatistics::Layer never = CheckAgainstNaive(shape, c);
  CHECK(never.misses == int64_t{shape.layers} * shape.kv_heads);
  // With a refresh a label lasts a quarter of the budget.
  c.refresh = true;
  c.steps = 25;
  const PolicyStatistics::Layer aged = CheckAgainstNaive(shape, c);
  CHECK(aged.misses == 2 * int64_t{shape.layers} * shape.kv_heads);
  // No two queries are equal, so every row selects anew.
  c.similarity = 1;
  const PolicyStatistics::Layer always = CheckAgainstNaive(shape, c);
  CHECK(always.misses == always.lookups);
  CHECK(always.recalled > never.recalled);
}
SLUICE_TEST_ON_CPU_AND_GPU("a threshold of -1 never selects again, and one of 1 always does",
                           TestNeverAndAlways)

void Traffic(const PolicyRig::Shape& of) {
  PolicyRig::Shape shape = of;
  const auto check = [&](int divisor, bool refresh, double persistent) {
    testing::CheckTraffic(shape, TurningQueries(shape), [&](const PolicyRig& rig, bool) {
      PolicyOptions options = rig.Options();
      options.budget_tokens = 80;
      options.dense_layers = 1;
      options.clo.budget_divisor = divisor;
      options.clo.refresh = refresh;
      options.clo.persistent_share = persistent;
      return MakeClo(options);
    });
  };
  check(0, true, 0);
  check(3, true, 0.7);
  shape.threads = 3;
  shape.row_bucket = 3;
  check(4, false, 0.5);
}
SLUICE_TEST_ON_CPU_AND_GPU("clo: sequences that come and go give to the bit what each gives alone",
                           Traffic)

TEST_CASE("a step reads what its heads keep, and codes of the heads that miss alone") {
  const PolicyRig::Shape shape;
  PolicyRig rig(shape, RandomVectors(shape, 0));
  PolicyOptions options = rig.Options();
  options.budget_tokens = 96;
  const auto policy = MakeClo(options);
  ModelConfig config;
  config.layers = shape.layers;
  config.heads = shape.heads;
  config.head_dim = shape.head_dim;
  config.hidden_size = 100;
  config.vocab_size = 7;
  const StepModel model{config, rig.hbm().layout(), 1'000'000};
  // In each layer a head missed in 4 of 20 lookups, and then selected 100 tokens, 30 of them new.
  PolicyStatistics statistics;
  statistics.layers.resize(static_cast<size_t>(shape.layers));
  for (PolicyStatistics::Layer& layer : statistics.layers) {
    layer.steps = 10;
    layer.lookups = 20;
    layer.misses = 4;
    layer.selected = 400;
    layer.missing = layer.recalled = 120;
  }
  const double token = 2 * 2 * shape.head_dim;  // K and V of a head, bf16
  const MemoryTraffic bytes = BytesOfStep(model, *policy, statistics, 2, 500);
  const double own = shape.kv_heads * token, brought = 12 * token;
  const double codes = 0.2 * static_cast<double>(policy->MetadataBytes(500));
  const double shared = 1'000'000 - 7 * 100 * 2 + 2 * (2.0 * 100 * shape.heads * shape.head_dim);
  CHECK(policy->MetadataBytes(500) == 500 * shape.kv_heads * 18);
  CHECK(bytes.hbm ==
        Approx(shared + 2 * shape.layers * (own + shape.kv_heads * 100 * token + brought + codes)));
  CHECK(bytes.to_device == Approx(2 * shape.layers * brought));
  CHECK(bytes.dram == Approx(bytes.to_device));
  // Workers that gather read it, write it to staging, and send nothing else over the link.
  options.clo.mover = PolicyOptions::Mover::kCpu;
  const MemoryTraffic gathered = BytesOfStep(model, *MakeClo(options), statistics, 2, 500);
  CHECK(gathered.dram == Approx(3 * bytes.dram));
  CHECK(gathered.hbm == bytes.hbm);
  CHECK(gathered.to_device == bytes.to_device);
  CHECK(gathered.to_host == bytes.to_host);
  // One of the two heads is persistent, and selected 110 tokens in every step.
  PolicyStatistics half = statistics;
  for (PolicyStatistics::Layer& layer : half.layers) {
    layer.lookups = 10;
    layer.misses = 2;
    layer.selected = 200;
    layer.resident_selected = 1100;
  }
  CHECK(BytesOfStep(model, *policy, half, 2, 500).hbm ==
        Approx(shared + 2 * shape.layers *
                            (own + (100 + 110) * token + brought +
                             0.6 * static_cast<double>(policy->MetadataBytes(500)))));
  // Where nothing missed, it is what has a place.
  for (PolicyStatistics::Layer& layer : statistics.layers) {
    layer.misses = layer.selected = layer.missing = layer.recalled = 0;
  }
  CHECK(BytesOfStep(model, *policy, statistics, 2, 500).hbm ==
        Approx(shared +
               2 * shape.layers *
                   (own + shape.kv_heads * static_cast<double>(policy->exact_tokens()) * token)));
}

TEST_CASE("clo: options out of range are refused by name") {
  const PolicyRig::Shape shape;
  PolicyRig rig(shape, RandomVectors(shape, 0));
  const auto refused = [&](const char* what, auto change) {
    PolicyOptions options = rig.Options();
    change(options);
    const absl::Status status = NewCloPolicy(options).status();
    CHECK(absl::IsInvalidArgument(status));
    CHECK_THAT(std::string(status.message()), Catch::Matchers::Contains(what));
  };
  refused("budget_tokens: policy", [](PolicyOptions& o) { o.budget_tokens = kRing + kSink - 1; });
  refused("clo_budget_divisor: ", [](PolicyOptions& o) { o.clo.budget_divisor = -1; });
  refused("clo_similarity: ", [](PolicyOptions& o) { o.clo.similarity = 1.5f; });
  refused("clo_similarity: ",
          [](PolicyOptions& o) { o.clo.similarity = std::numeric_limits<float>::quiet_NaN(); });
  refused("clo_persistent_share: ", [](PolicyOptions& o) { o.clo.persistent_share = 1.1; });
  refused("clo_resident_share: ", [](PolicyOptions& o) { o.clo.resident_share = -0.1; });
  refused("clo.difficulty: ", [](PolicyOptions& o) { o.clo.difficulty = {1}; });
  refused("clo.predicted: ", [](PolicyOptions& o) { o.clo.predicted = {1}; });
  refused("clo.misses: ", [](PolicyOptions& o) { o.clo.misses = {1}; });
  refused("clo.thresholds: ", [](PolicyOptions& o) { o.clo.thresholds = {1, 1}; });
  refused("clo_hash_bits: ", [](PolicyOptions& o) { o.clo.hash_bits = 100; });
  refused("clo_hash_bits: ", [](PolicyOptions& o) { o.clo.hash_bits = 288; });
  refused("heads: ", [](PolicyOptions& o) { o.heads = 1000; });
  refused("clo_hash_levels: ", [](PolicyOptions& o) { o.clo.hash_levels = 3; });
  refused("score_reduction: ",
          [](PolicyOptions& o) { o.reduction = kernels::GroupReduction::kSoftmaxSum; });
  for (const int workers : {0, 65}) {
    refused("clo_mover_workers: policy", [&](PolicyOptions& o) {
      o.clo.mover = PolicyOptions::Mover::kCpu;
      o.clo.mover_workers = workers;
    });
  }
}

}  // namespace
}  // namespace sluice
