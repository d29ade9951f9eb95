// Batches of the bench: what is said to fit runs, and what does not fit is said to.
#include "src/bench/engine_run.h"

#include <catch2/catch.hpp>

#include "src/bench/policy_run.h"
#include "src/device/cpu/cpu_device.h"
#include "tests/fixtures/fixtures.h"

namespace sluice {
namespace {

template <typename T>
T OrFail(absl::StatusOr<T> value) {
  INFO(std::string(value.status().ToString()));
  REQUIRE(value.ok());
  return *std::move(value);
}

TEST_CASE("the largest batch of policy ess runs where DRAM has no room for its index keys") {
  constexpr int kContext = 1024, kSlots = 9;
  CpuDeviceOptions cpu;
  cpu.threads = 1;
  const std::unique_ptr<Device> device = OrFail(NewCpuDevice(cpu));
  Model::Options of;
  of.directory = fixtures::ModelDir("tiny-deepseek-v32");
  of.max_context = 2048;
  of.max_rows = 512 + kSlots;
  of.max_logits = kSlots;
  of.kv_dtype = DType::kFloat8E4M3;
  const std::unique_ptr<Model> model = OrFail(Model::Load(of, device.get()));
  EngineRunOptions options;
  options.context = kContext;
  options.steps = 1;
  options.windows = 1;
  options.random_context = false;
  options.patience = absl::Milliseconds(300);
  const int total = kContext + EngineTokens(options);
  PolicyWorld world;
  world.device = device.get();
  world.model = model.get();
  world.max_context = total;
  world.slots = kSlots;
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

}  // namespace
}  // namespace sluice
