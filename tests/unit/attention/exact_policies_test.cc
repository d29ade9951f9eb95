// Exact where it fits: while a sequence has no more tokens than the policy's exact_tokens(), a
// decode row attends to all of them with its real queries, and nothing but its own keys and values
// goes over the link. Budgets, blocks, dense layers, hints and lengths are drawn anew.
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "src/attention/policy_factory.h"
#include "src/base/rng.h"
#include "tests/test_main.h"
#include "tests/unit/attention/constant_predictor.h"
#include "tests/unit/attention/policy_rig.h"

namespace sluice {
namespace {

using testing::PolicyRig;
using testing::RelativeError;

// Kernels may round queries to bf16 before a product.
constexpr double kTolerance = 1e-2;
constexpr int kTrials = 6;

std::unique_ptr<AttentionPolicy> MakePolicy(const PolicyOptions& options) {
  auto policy = NewPolicy(options);
  INFO(std::string(policy.status().ToString()));
  REQUIRE(policy.ok());
  return *std::move(policy);
}

int Below(SplitMix64& random, int end) {
  return static_cast<int>(random.Below(static_cast<uint64_t>(end)));
}

// Returns up to how many tokens the policy must be exact: its budget and its ring.
int64_t LimitOf(const PolicyOptions& options, int block_tokens) {
  const int budget = options.budget_tokens / block_tokens * block_tokens;
  if (options.name == "scout") return budget + 2 * block_tokens;
  if (options.name == "recall") return budget + block_tokens;
  if (options.name == "hgca") return options.hgca.window_tokens;
  if (options.name == "fluxion") {
    return (options.budget_tokens + block_tokens - 1) / block_tokens * block_tokens + 384;
  }
  if (options.name == "clo") {  // its budget is rounded up to whole blocks
    return (options.budget_tokens + block_tokens - 1) / block_tokens * block_tokens + 64;
  }
  return budget;
}

// Returns hints that name some blocks of some heads.
SelectionHints DrawHints(SplitMix64& random, const PolicyRig::Shape& shape, int context) {
  SelectionHints hints;
  hints.unit_tokens = static_cast<uint32_t>(shape.block_tokens);
  const int blocks = (context + shape.block_tokens - 1) / shape.block_tokens;
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (int head = 0; head < shape.kv_heads; ++head) {
      SelectionHints::Entry entry;
      entry.layer = static_cast<uint32_t>(layer);
      entry.kv_head = static_cast<uint32_t>(head);
      for (int block = 0; block < blocks; ++block) {
        if (Below(random, 3) == 0) entry.units.push_back(static_cast<uint32_t>(block));
      }
      if (!entry.units.empty()) hints.entries.push_back(std::move(entry));
    }
  }
  return hints;
}

struct Sums {
  int64_t missing = 0, recalled = 0, link_bytes = 0;
};
Sums SumsOf(const AttentionPolicy& policy) {
  Sums sums;
  for (const PolicyStatistics::Layer& layer : policy.Statistics().layers) {
    sums.missing += layer.missing;
    sums.recalled += layer.recalled;
    sums.link_bytes += layer.link_bytes;
  }
  return sums;
}

// Runs some sequences together, from before the limit to past it. Returns how many rows were past
// it.
int RunSequences(PolicyRig& rig, AttentionPolicy& policy, const PolicyOptions& options,
                 SplitMix64& random) {
  const PolicyRig::Shape& shape = rig.shape();
  const auto limit = static_cast<int>(policy.exact_tokens());
  const int sparse = shape.layers - options.dense_layers;
  const int steps = 8 + Below(random, 3 * shape.block_tokens);
  std::vector<int32_t> slots;
  std::vector<uint64_t> seeds;
  for (int32_t slot = 0; slot < 1 + Below(random, 3); ++slot) {
    // Any length, or one at which the limit is near.
    const int context = Below(random, 2) == 0 ? 1 + Below(random, limit)
                                              : std::max(1, limit - Below(random, steps + 1));
    const int total = context + steps + Below(random, 40);
    INFO("slot " << slot << ", context " << context << " of " << total);
    seeds.push_back(random.Below(100000));
    slots.push_back(slot);
    const SelectionHints hints =
        Below(random, 2) == 0 ? DrawHints(random, shape, context) : SelectionHints{};
    rig.Admit(policy, slot, seeds.back(), context, total,
              /*compute_last=*/context > 1 && Below(random, 2) == 0, hints);
  }
  int past = 0;
  for (int step = 0; step < steps; ++step) {
    const Sums before = SumsOf(policy);
    std::vector<int> positions;
    for (const int32_t slot : slots) positions.push_back(rig.position(slot));
    const auto out = rig.Step(policy, slots);
    bool all_fit = true;
    for (size_t row = 0; row < slots.size(); ++row) {
      const int position = positions[row];
      if (position + 1 > limit) {
        all_fit = false;
        ++past;
        continue;
      }
      const bool looks = position + 1 == limit || Below(random, 6) == 0;
      for (int layer = 0; looks && layer < shape.layers; ++layer) {
        INFO("step " << step << ", layer " << layer << ", position " << position);
        const auto want =
            rig.Naive(seeds[row], layer, position, [](int, int) { return PolicyRig::Who::kReal; });
        CHECK(RelativeError(out[static_cast<size_t>(layer)][row], want) <= kTolerance);
      }
    }
    if (!all_fit || options.name == "oracle") continue;
    INFO("step " << step);
    const Sums after = SumsOf(policy);
    CHECK(after.missing == before.missing);
    CHECK(after.recalled == before.recalled);
    const int64_t written =
        std::ssize(slots) * sparse * shape.kv_heads * int64_t{2} * shape.head_dim * 2;
    CHECK(after.link_bytes - before.link_bytes == written);
  }
  for (const int32_t slot : slots) rig.Release(policy, slot);
  return past;
}

void CheckExactWhileItFits(const PolicyRig::Shape& of) {
  SplitMix64 random(TestSeed());
  for (const char* name : {"scout", "recall", "hgca", "oracle", "clo", "fluxion"}) {
    int past = 0;
    for (int trial = 0; trial < kTrials; ++trial) {
      PolicyRig::Shape shape = of;
      shape.block_tokens = Below(random, 2) == 0 ? 16 : 32;
      shape.slots = 3;
      PolicyRig rig(shape, testing::RandomVectors(shape, 5.0f));  // a worthless prediction
      PolicyOptions options = rig.Options();
      options.name = name;
      options.budget_tokens =
          (2 + Below(random, 4)) * shape.block_tokens + Below(random, shape.block_tokens);
      if (options.name == "clo") {
        options.budget_tokens += 68;  // its ring and first tokens
        options.clo.persistent_share = 0.5 * trial / kTrials;
      }
      if (options.name == "fluxion") {
        options.budget_tokens += 64;  // its first tokens
        if (trial >= kTrials / 2) {
          options.fluxion.predictor = testing::ConstantPredictor({1, 1, 1, 1}, /*streaming=*/true);
        }
        if (trial % 2 == 1) options.fluxion.placement = PolicyOptions::Fluxion::Placement::kPull;
      }
      options.dense_layers = trial % 3;
      options.workers = 1 + Below(random, 2);
      options.hgca.window_tokens = (1 + Below(random, 4)) * shape.block_tokens;
      INFO(name << ", budget " << options.budget_tokens << ", blocks of " << shape.block_tokens
                << ", dense layers " << options.dense_layers);
      const auto policy = MakePolicy(options);
      REQUIRE(policy->exact_tokens() == LimitOf(options, shape.block_tokens));
      // Sequences come into slots that others had.
      for (int round = 0; round < 2; ++round) past += RunSequences(rig, *policy, options, random);
    }
    CHECK(past > 0);
  }
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "while a sequence fits, a row attends to all of it and nothing is left to the CPU or fetched",
    CheckExactWhileItFits)

TEST_CASE("what a policy says of its exactness follows its options") {
  PolicyRig::Shape shape;
  PolicyRig rig(shape, testing::RandomVectors(shape, 0));
  const auto exact = [&](const char* name, auto change) {
    PolicyOptions options = rig.Options();
    options.name = name;
    options.budget_tokens = 64;
    change(options);
    return MakePolicy(options)->exact_tokens();
  };
  const auto as_is = [](PolicyOptions&) {};
  CHECK(exact("full", as_is) == shape.max_context);
  CHECK(exact("scout", as_is) == 64 + 32);
  CHECK(exact("scout", [](PolicyOptions& o) { o.scout.attend_whole = false; }) == 32);
  CHECK(exact("scout", [](PolicyOptions& o) { o.budget_tokens = 4096; }) == shape.max_context);
  CHECK(exact("scout", [](PolicyOptions& o) { o.dense_layers = 3; }) == shape.max_context);
  CHECK(exact("recall", as_is) == 64 + 16);
  CHECK(exact("recall", [](PolicyOptions& o) { o.recall.fetch_all = true; }) == 16);
  CHECK(exact("hgca", as_is) == 512);
  CHECK(exact("hgca", [](PolicyOptions& o) { o.hgca.beta = 0; }) == shape.max_context);
  CHECK(exact("oracle", as_is) == 64);
}

}  // namespace
}  // namespace sluice
