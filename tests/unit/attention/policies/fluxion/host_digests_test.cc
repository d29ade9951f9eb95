// Policy fluxion with digests in DRAM, beside the same with digests in HBM.
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "src/attention/policies/fluxion/fluxion_policy.h"
#include "src/base/failpoint.h"
#include "tests/test_main.h"
#include "tests/unit/attention/policy_rig.h"

namespace sluice {
namespace {

using testing::PolicyRig;

// Results of a run, [step][layer][row][value].
using Results = std::vector<std::vector<std::vector<std::vector<float>>>>;

PolicyRig::Shape ShapeOf(int group) {
  PolicyRig::Shape shape;
  shape.layers = 3;
  shape.heads = 2 * group;
  shape.max_context = 1500;
  return shape;
}

// Blocks of 16 and a tenth of each head's tokens, with the arithmetic of the device's kernels on
// the workers too.
PolicyOptions OptionsOf(const PolicyRig& rig, bool in_dram) {
  PolicyOptions options = rig.Options();
  options.host_kernels = kernels::FindKernelTable("portable");
  options.dense_layers = 1;
  options.workers = 3;
  options.budget_tokens = 128;
  options.fluxion.device_share = 0;
  options.fluxion.fixed_block = 16;
  options.fluxion.fixed_share = 0.1;
  options.fluxion.digests_in_dram = in_dram;
  options.fluxion.resident = false;
  options.fluxion.all_levels = true;
  return options;
}

std::unique_ptr<AttentionPolicy> Make(const PolicyOptions& options) {
  auto policy = NewFluxionPolicy(options);
  INFO(std::string(policy.status().ToString()));
  REQUIRE(policy.ok());
  return *std::move(policy);
}

struct Run {
  Results results;
  std::vector<PolicyStatistics::Layer> layers;
};

// Decodes sequences of any length, in rows that change from step to step. Chunks of digests become
// complete meanwhile, and two sequences have another turn, of which one is shorter than the last.
Run Decode(const PolicyRig::Shape& shape, bool in_dram, uint64_t seed) {
  PolicyRig rig(shape, testing::RandomVectors(shape, 0));
  const auto policy = Make(OptionsOf(rig, in_dram));
  Run run;
  rig.Admit(*policy, 0, seed, 1150, 1400);
  rig.Admit(*policy, 1, seed + 1, 20, 200);
  rig.Admit(*policy, 2, seed + 2, 750, 1000);
  const std::vector<std::vector<int32_t>> rows = {{0, 1, 2}, {2, 0}, {0}, {1, 2, 0}};
  for (size_t step = 0; step < 40; ++step) {
    run.results.push_back(rig.Step(*policy, rows[step % rows.size()]));
    if (step == 15) rig.NextTurn(*policy, 0, 1450);
    if (step == 20) rig.NextTurn(*policy, 2, 850);
    if (step == 25) {
      rig.Release(*policy, 1);
      rig.Admit(*policy, 1, seed + 3, 605, 700);
    }
  }
  run.layers = policy->Statistics().layers;
  for (int slot = 0; slot < 3; ++slot) {
    CHECK(policy->SlotHealth(slot).ok());
    rig.Release(*policy, slot);
  }
  CHECK(rig.dram().UsageOf(0).reserved_bytes == 0);
  CHECK(rig.hbm().UsageOf(0).reserved_bytes == 0);
  return run;
}

TEST_CASE("digests in DRAM give, to the bit, what digests in HBM give") {
  const uint64_t seed = TestSeed();
  for (const int group : {1, 3, 4}) {
    for (const int row_bucket : {0, 4}) {  // steps as they come, and recorded and padded ones
      PolicyRig::Shape shape = ShapeOf(group);
      shape.row_bucket = row_bucket;
      INFO("group of " << group << ", row bucket " << row_bucket);
      const Run in_hbm = Decode(shape, false, seed), in_dram = Decode(shape, true, seed);
      CHECK(in_dram.results == in_hbm.results);
      REQUIRE(in_dram.layers.size() == in_hbm.layers.size());
      for (size_t layer = 0; layer < in_hbm.layers.size(); ++layer) {
        const PolicyStatistics::Layer &got = in_dram.layers[layer], &want = in_hbm.layers[layer];
        CHECK(got.steps == want.steps);
        CHECK(got.selected == want.selected);
        CHECK(got.missing == want.missing);
        CHECK((got.missing > 0) == (layer > 0));
        CHECK(got.link_bytes == want.link_bytes);
      }
    }
  }
}

TEST_CASE("digests in DRAM are counted there, and not in HBM") {
  const PolicyRig::Shape shape = ShapeOf(2);
  PolicyRig rig(shape, testing::RandomVectors(shape, 0));
  const auto in_hbm = Make(OptionsOf(rig, false)), in_dram = Make(OptionsOf(rig, true));
  const Footprint hbm = in_hbm->FootprintOf(1000, 1200), dram = in_dram->FootprintOf(1000, 1200);
  CHECK(hbm.dram_tokens == 1200);
  // Two layers of three have digests: rows of K's bytes twice, for every 16, 32, 64 and 128 tokens,
  // so 15 blocks' worth of K for each 128 tokens, in pages of whole blocks.
  const int64_t digests = dram.dram_tokens.least() - 1200;
  CHECK(digests >= 1200 * 15 / 128 * 2 / 3);
  CHECK(digests <= 1200 * 15 / 128);
  CHECK(dram.hbm_tokens.least() < hbm.hbm_tokens.least());
  CHECK(in_dram->HostMetadataBytes(1200) == in_hbm->MetadataBytes(1200));
  CHECK(in_dram->MetadataBytes(1200) + in_hbm->HostMetadataBytes(1200) == 0);
  rig.Admit(*in_dram, 0, 1, 1000, 1200);
  CHECK(rig.dram().UsageOf(0).used_bytes == rig.dram().layout().BytesFor(dram.dram_tokens));
  rig.Release(*in_dram, 0);
  CHECK(rig.dram().UsageOf(0).reserved_bytes == 0);
}

#ifndef SLUICE_NO_FAILPOINTS

// Lists are short, of one part of scores, so that the second task of a worker is a selection.
TEST_CASE("a worker that fails or dies while it makes lists ends its group's sequences alone") {
  const PolicyRig::Shape shape = ShapeOf(2);
  for (const std::string fault :
       {"attention.worker=error*1", "attention.worker_exit=error*1", "attention.worker=error*1@5",
        "attention.worker_exit=error*1@5", "attention.worker_exit=error*1@8"}) {
    const PolicyRig::Make make = testing::RandomVectors(shape, 0);
    PolicyRig rig(shape, make), other(shape, make);
    const auto policy = Make(OptionsOf(rig, true)), twin = Make(OptionsOf(other, true));
    const std::vector<int32_t> slots = {0, 1, 2, 3};
    for (const int32_t slot : slots) {
      rig.Admit(*policy, slot, static_cast<uint64_t>(slot), 900, 1000);
      other.Admit(*twin, slot, static_cast<uint64_t>(slot), 900, 1000);
    }
    rig.Step(*policy, slots);
    other.Step(*twin, slots);
    {
      const ScopedFailpoints armed(fault);
      rig.Step(*policy, slots);
    }
    other.Step(*twin, slots);
    INFO(fault);
    std::vector<int32_t> left;
    for (const int32_t slot : slots) {
      if (policy->SlotHealth(slot).ok()) left.push_back(slot);
    }
    // The groups have every other slot each.
    REQUIRE(left.size() == 2);
    CHECK(left[1] == left[0] + 2);
    CHECK(rig.Step(*policy, left) == other.Step(*twin, left));
    // A sequence that comes after one that ended is served by the workers that are left.
    const int32_t next = left[0] == 0 ? 1 : 0;
    rig.Release(*policy, next);
    other.Release(*twin, next);
    rig.Admit(*policy, next, 9, 700, 800);
    other.Admit(*twin, next, 9, 700, 800);
    CHECK(rig.Step(*policy, {next, left[0]}) == other.Step(*twin, {next, left[0]}));
    CHECK(policy->SlotHealth(next).ok());
  }
}

#endif

}  // namespace
}  // namespace sluice
