// Policy fluxion with sequences that grow: when an answer that had no anchor begins to read what is
// predicted, with steps that are recorded and steps that are not.
#include <algorithm>
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "kernels/fluxion_segments.h"
#include "kernels/kernel_table.h"
#include "src/attention/policies/fluxion/fluxion_policy.h"
#include "src/device/trace.h"
#include "tests/test_main.h"
#include "tests/unit/attention/constant_predictor.h"
#include "tests/unit/attention/policy_rig.h"

namespace sluice {
namespace {

using testing::ConstantPredictor;
using testing::PolicyRig;
using testing::RelativeError;

constexpr double kTolerance = 1e-2;
constexpr int kRingTokens = 384;
// The first row of an answer with enough tokens to measure, and the row at which that counts.
constexpr int kAnchor = 639, kCounts = 671;

std::unique_ptr<AttentionPolicy> Make(const PolicyOptions& options) {
  auto policy = NewFluxionPolicy(options);
  INFO(std::string(policy.status().ToString()));
  REQUIRE(policy.ok());
  return *std::move(policy);
}

int64_t SelectedBy(const AttentionPolicy& policy) {
  int64_t sum = 0;
  for (const PolicyStatistics::Layer& layer : policy.Statistics().layers) sum += layer.selected;
  return sum;
}

// Options with a predictor that lets every head stream, as soon as there is an anchor.
PolicyOptions Streaming(const PolicyRig& rig) {
  PolicyOptions options = rig.Options();
  options.dense_layers = 0;
  options.fluxion.predictor = ConstantPredictor({1, 1, 1, 1}, /*streaming=*/true);
  options.fluxion.resident = false;
  return options;
}

// Decodes a row of the slot, and checks whether it reads everything, or sink and ring alone.
void CheckStep(PolicyRig& rig, AttentionPolicy& policy, int slot, uint64_t seed, bool reads_all) {
  const int position = rig.position(slot);
  const int64_t before = SelectedBy(policy);
  const auto out = rig.Step(policy, {slot});
  INFO("position " << position);
  const PolicyRig::Shape& shape = rig.shape();
  const int64_t all =
      int64_t{shape.layers} * shape.kv_heads * kernels::CpuTokens(kernels::SegmentsOf(position));
  CHECK(SelectedBy(policy) - before == (reads_all ? all : 0));
  const int blocks = position / shape.block_tokens - kRingTokens / shape.block_tokens + 1;
  const int ring = std::max(blocks, 0) * shape.block_tokens;
  for (int layer = 0; layer < shape.layers; ++layer) {
    const auto want = rig.Naive(seed, layer, position, [&](int, int token) {
      const bool is_read = reads_all || token < kernels::kFluxionSinkTokens || token >= ring;
      return is_read ? PolicyRig::Who::kReal : PolicyRig::Who::kNobody;
    });
    CHECK(RelativeError(out[static_cast<size_t>(layer)][0], want) <= kTolerance);
  }
}

void StepTo(PolicyRig& rig, AttentionPolicy& policy, int slot, int position) {
  while (rig.position(slot) < position) rig.Step(policy, {slot});
}

void TestGrows(const PolicyRig::Shape& of) {
  PolicyRig::Shape shape = of;
  for (const int row_bucket : {0, 4}) {
    INFO("steps are " << (row_bucket > 0 ? "recorded" : "enqueued"));
    shape.row_bucket = row_bucket;
    PolicyRig rig(shape, testing::RandomVectors(shape, 0));
    const auto policy = Make(Streaming(rig));
    const uint64_t seed = TestSeed();
    rig.Admit(*policy, 1, seed, 500, 1000);
    for (const int position : {600, kAnchor, kAnchor + 1, kCounts - 1, kCounts, kCounts + 20}) {
      StepTo(rig, *policy, 1, position);
      CheckStep(rig, *policy, 1, seed, position < kCounts);
    }
    rig.Release(*policy, 1);
  }
}
SLUICE_TEST_ON_CPU_AND_GPU("a sequence without an anchor reads what is predicted once it has grown",
                           TestGrows)

void TestTurns(const PolicyRig::Shape& shape) {
  PolicyRig rig(shape, testing::RandomVectors(shape, 0));
  const auto policy = Make(Streaming(rig));
  const uint64_t seed = TestSeed();
  rig.Admit(*policy, 0, seed, 620, 700);
  StepTo(rig, *policy, 0, kAnchor + 3);
  rig.Release(*policy, 0);  // while its anchor is measured
  rig.Admit(*policy, 0, seed + 1, 900, 1000, /*computed=*/3);
  for (int i = 0; i < 2; ++i) CheckStep(rig, *policy, 0, seed + 1, /*reads_all=*/false);
  rig.Release(*policy, 0);
  rig.Admit(*policy, 0, seed + 2, 620, 800);
  StepTo(rig, *policy, 0, kAnchor + 6);
  CheckStep(rig, *policy, 0, seed + 2, /*reads_all=*/true);
  // The turn begins without an anchor, and its first row is the next one.
  rig.NextTurn(*policy, 0, 900);
  const int first = rig.position(0);
  StepTo(rig, *policy, 0, first + kCounts - kAnchor - 1);
  CheckStep(rig, *policy, 0, seed + 2, /*reads_all=*/true);
  CheckStep(rig, *policy, 0, seed + 2, /*reads_all=*/false);
  rig.Release(*policy, 0);
}
SLUICE_TEST_ON_CPU_AND_GPU("a new anchor ends with its sequence's turn", TestTurns)

// Budgets follow those of the anchor.
std::shared_ptr<const FluxionPredictor> FollowsAnchor() {
  FluxionPredictor predictor = *ConstantPredictor({0.1f, 0.1f, 0.1f, 0.1f}, /*streaming=*/false);
  constexpr size_t kAnchorBudgets = 35;
  for (size_t level = 0; level < kernels::kFluxionLevels; ++level) {
    predictor.layers[0].weights[level * kernels::kFluxionFeatures + kAnchorBudgets + level] = 2;
  }
  return std::make_shared<const FluxionPredictor>(std::move(predictor));
}

struct Bits {
  std::vector<std::vector<std::vector<float>>> outputs;  // [step][layer][value]
  int64_t selected = 0;                                  // of all sequences
};

// Decodes a sequence in slot 2 beside `others` that grow with it.
Bits Decode(uint64_t seed, int threads, int workers, int others) {
  PolicyRig::Shape shape;
  shape.threads = threads;
  PolicyRig rig(shape, testing::RandomVectors(shape, 0));
  PolicyOptions options = rig.Options();
  options.host_kernels = kernels::FindKernelTable("portable");
  options.workers = workers;
  options.budget_tokens = 128;
  options.fluxion.device_share = 0.5;  // by default it depends on the number of workers
  options.fluxion.predictor = FollowsAnchor();
  const auto policy = Make(options);
  std::vector<int32_t> slots = {2};
  rig.Admit(*policy, 2, seed, 600, 900);
  for (int slot = 0; slot < others; ++slot) {
    rig.Admit(*policy, slot, seed + 1 + static_cast<uint64_t>(slot), 600 + 3 * slot, 900);
    slots.push_back(slot);
  }
  Bits bits;
  for (int step = 0; step < 150; ++step) {
    auto& outputs = bits.outputs.emplace_back();
    for (const auto& layer : rig.Step(*policy, slots)) outputs.push_back(layer[0]);
  }
  bits.selected = SelectedBy(*policy);
  for (const int32_t slot : slots) rig.Release(*policy, slot);
  return bits;
}

// Returns the first step whose outputs differ; -1: none does.
int FirstDifference(const Bits& a, const Bits& b) {
  for (size_t step = 0; step < a.outputs.size(); ++step) {
    if (a.outputs[step] != b.outputs[step]) return static_cast<int>(step);
  }
  return -1;
}

TEST_CASE("results of a sequence that grows are the same in any batch, at any pace") {
  const uint64_t seed = TestSeed();
  const Bits alone = Decode(seed, 1, 1, 0);
  const Bits again = Decode(seed, 1, 1, 0);
  CHECK(FirstDifference(alone, again) == -1);
  CHECK(alone.selected == again.selected);
  CHECK(FirstDifference(alone, Decode(seed, 2, 3, 0)) == -1);
  CHECK(FirstDifference(alone, Decode(seed, 1, 1, 2)) == -1);
}

// Returns how often a sequence's anchor was measured in a layer while it grew from 620 tokens to
// 700.
int64_t Measured(bool predicts) {
  PolicyRig::Shape shape;
  PolicyRig rig(shape, testing::RandomVectors(shape, 0));
  PolicyOptions options = Streaming(rig);
  if (!predicts) options.fluxion.predictor = nullptr;
  const auto policy = Make(options);
  rig.Admit(*policy, 0, TestSeed(), 620, 720);
  auto trace = rig.device().StartTrace();
  REQUIRE(trace.ok());
  StepTo(rig, *policy, 0, 700);
  const auto slices = (*trace)->Stop();
  REQUIRE(slices.ok());
  rig.Release(*policy, 0);
  return std::count_if(slices->begin(), slices->end(),
                       [](const TraceSlice& slice) { return slice.name == "anchor_statistics"; });
}

TEST_CASE("an anchor is measured once in each sparse layer, and never without a predictor") {
  CHECK(Measured(/*predicts=*/true) == PolicyRig::Shape().layers);
  CHECK(Measured(/*predicts=*/false) == 0);
}

}  // namespace
}  // namespace sluice
