// Tests the bench's batches: a batch that is reported to fit runs, one that does not fit is
// reported, and sequences decode together or not at all.
#include "src/bench/harness/engine_run.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "src/attention/forwarding_policy.h"
#include "src/bench/harness/policy_run.h"
#include "src/device/cpu/cpu_device.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/or_fail.h"

namespace sluice::bench {
namespace {

std::unique_ptr<Model> LatentModel(Device* device, int slots) {
  Model::Options options;
  options.directory = fixtures::ModelDir("tiny-deepseek-v32");
  options.max_context = 2048;
  options.max_rows = 512 + slots;
  options.max_logits = slots;
  options.kv_dtype = DType::kFloat8E4M3;
  return OrFail(Model::Load(options, device));
}

PolicyWorld WorldOf(Device& device, Model& model, int slots, int max_context) {
  PolicyWorld world;
  world.device = &device;
  world.model = &model;
  world.slots = slots;
  world.max_context = max_context;
  return world;
}

TEST_CASE("the largest batch of policy ess runs where DRAM has no room for its index keys") {
  constexpr int kContext = 1024, kSlots = 9;
  const std::unique_ptr<Device> device = OrFail(NewCpuDevice({"auto", 1}));
  const std::unique_ptr<Model> model = LatentModel(device.get(), kSlots);
  EngineRunOptions options;
  options.context = kContext;
  options.steps = 1;
  options.windows = 1;
  options.random_context = false;
  options.patience = absl::Milliseconds(300);
  const int total = kContext + EngineTokens(options);
  PolicyWorld world = WorldOf(*device, *model, kSlots, total);
  for (const int64_t slabs : {22, 23, 24, 25}) {  // PageSlabs::SlabBytes
    INFO(slabs << " slabs");
    const auto tiers =
        OrFail(BenchTiers::Create(*device, int64_t{64} << 20, slabs * 692'736 + 4096));
    REQUIRE(tiers->Cut(&world, "ess").ok());
    const auto policy = OrFail(SetUpPolicy(world, "ess"));
    const Admission admission = LargestBatch(world, *policy, kContext, total);
    REQUIRE(admission.bound == "DRAM");
    const Footprint each = policy->FootprintOf(kContext, total);
    REQUIRE(world.dram->SequencesThatFit(each.dram_tokens) < admission.batch);
    options.dram = world.dram;
    for (const int more : {0, 1}) {
      options.batch = admission.batch + more;
      const absl::Status status =
          RunEngine(options, kSlots, device.get(), model.get(), world.hbm, policy.get()).status();
      INFO(std::string(status.ToString()));
      REQUIRE(status.code() ==
              (more == 0 ? absl::StatusCode::kOk : absl::StatusCode::kResourceExhausted));
    }
  }
}

// Makes every working set take long, and counts the steps in which some sequences decode and others
// do not.
class SlowWarmUps : public ForwardingPolicy {
 public:
  SlowWarmUps(AttentionPolicy* policy, int context, int batch)
      : ForwardingPolicy(policy), context_(context), batch_(batch) {}

  void EndPrompt(int slot, int64_t tokens, SelectionHints hints) override {
    ForwardingPolicy::EndPrompt(slot, tokens, std::move(hints));
    // One behind the other, as on one stream of a device.
    warm_at_ = std::max(warm_at_, absl::Now()) + absl::Milliseconds(20);
    slot_warm_at_[slot] = warm_at_;
  }
  bool Warm(int slot) override {
    const auto it = slot_warm_at_.find(slot);
    return (it == slot_warm_at_.end() || absl::Now() >= it->second) && ForwardingPolicy::Warm(slot);
  }
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override {
    ForwardingPolicy::BeginStep(stream, slots, positions);
    const auto decode = std::count_if(positions.begin(), positions.end(),
                                      [this](int32_t p) { return p >= context_; });
    whole_ += decode == batch_ ? 1 : 0;
    partial_ += decode > 0 && decode < batch_ ? 1 : 0;
  }
  int whole() const { return whole_; }
  int partial() const { return partial_; }

 private:
  const int context_, batch_;
  absl::Time warm_at_ = absl::InfinitePast();
  std::map<int, absl::Time> slot_warm_at_;
  int whole_ = 0, partial_ = 0;
};

TEST_CASE("no sequence decodes before the working sets of all are made") {
  constexpr int kContext = 96, kBatch = 3;
  const std::unique_ptr<Device> device = OrFail(NewCpuDevice({"auto", 1}));
  Model::Options model_options;
  model_options.directory = fixtures::SourceDir("tiny-llama");
  model_options.load_format = "dummy";
  model_options.max_context = 512;
  model_options.max_rows = 512 + kBatch;
  model_options.max_logits = kBatch;
  const std::unique_ptr<Model> model = OrFail(Model::Load(model_options, device.get()));
  EngineRunOptions options;
  options.batch = kBatch;
  options.context = kContext;
  options.steps = 4;
  options.windows = 2;
  PolicyWorld world = WorldOf(*device, *model, kBatch, kContext + EngineTokens(options));
  const auto tiers = OrFail(BenchTiers::Create(*device, int64_t{16} << 20, int64_t{16} << 20));
  REQUIRE(tiers->Cut(&world, "scout").ok());
  options.dram = world.dram;
  const auto policy = OrFail(SetUpPolicy(world, "scout"));
  SlowWarmUps slow(policy.get(), kContext, kBatch);
  OrFail(RunEngine(options, kBatch, device.get(), model.get(), world.hbm, &slow));
  CHECK(slow.whole() >= options.windows * options.steps);
  CHECK(slow.partial() == 0);
}

TEST_CASE("leftovers in the pool do not break a run that fetches nothing") {
  constexpr int kContext = 1024, kSlots = 2;
  const std::unique_ptr<Device> device = OrFail(NewCpuDevice({"auto", 1}));
  const std::unique_ptr<Model> model = LatentModel(device.get(), kSlots);
  EngineRunOptions options;
  options.batch = kSlots;
  options.context = kContext;
  options.steps = 16;
  options.windows = 2;
  options.random_context = false;
  PolicyWorld world = WorldOf(*device, *model, kSlots, kContext + EngineTokens(options));
  const auto tiers = OrFail(BenchTiers::Create(*device, int64_t{16} << 20, int64_t{64} << 20));
  const std::string policy_name = "ess:least=160:ratio=0.1:skip=1";
  REQUIRE(tiers->Cut(&world, policy_name).ok());
  options.dram = world.dram;
  for (const absl::Span<uint8_t> free : world.hbm->FreeMemory()) {
    std::fill(free.begin(), free.end(), uint8_t{0xFF});  // NaN.
  }
  const auto policy = OrFail(SetUpPolicy(world, policy_name));
  OrFail(RunEngine(options, kSlots, device.get(), model.get(), world.hbm, policy.get()));
  const PolicyStatistics seen = policy->Statistics();
  int64_t misses = 0;
  for (const PolicyStatistics::Layer& layer : seen.layers) misses += layer.missing;
  CHECK(misses > 0);
}

}  // namespace
}  // namespace sluice::bench
