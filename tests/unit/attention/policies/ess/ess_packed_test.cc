// Tests policy ess on packed entries of the published shape, on the CPU and on a GPU: against
// policy full, whose inputs are the same to the bit, with drafts, and with steps that are recorded
// again.
#include <catch2/catch.hpp>
#include <memory>
#include <vector>

#include "src/device/kernel_set.h"
#include "tests/support/device.h"
#include "tests/test_main.h"
#include "tests/unit/attention/latent_rig.h"
#include "tests/unit/attention/policy_rig.h"  // RelativeError

namespace sluice {
namespace {

using testing::LatentRig;
using testing::RelativeError;
using Overlap = PolicyOptions::Ess::Overlap;
using Result = std::vector<std::vector<std::vector<float>>>;

LatentRig::Shape Packed(const std::string& kernels) {
  LatentRig::Shape shape;
  shape.kernels = kernels;
  shape.packed = true;
  shape.layers = 2;
  shape.heads = 128;
  shape.rank = 512;
  shape.rope = 64;
  shape.index_heads = 64;
  shape.top_k = 64;
  shape.block_tokens = 32;
  shape.max_context = 640;
  shape.drift = 0.1;
  shape.row_bucket = kernels == "cuda" ? 0 : 4;                // a GPU records and pads by itself
  if (kernels != "cuda") shape.heads = shape.index_heads = 2;  // to be quick enough
  return shape;
}

bool IsHere(const std::string& kernels) {
  const absl::StatusOr<std::unique_ptr<Device>> device = testing::TestDevice(kernels);
  if (absl::IsNotFound(device.status())) {
    SkipTest(std::string(device.status().message()));
    return false;
  }
  REQUIRE(device.ok());
  return true;
}

void CheckAgainstFull(const std::string& kernels) {
  if (!IsHere(kernels)) return;
  LatentRig full(Packed(kernels), {}, "full");
  PolicyOptions::Ess ess;
  ess.sparse_memory_ratio = 0.2;
  ess.least_places = 96;
  std::vector<std::unique_ptr<LatentRig>> rigs;
  const std::vector<Overlap> overlaps = {Overlap::kNone, Overlap::kDa, Overlap::kDba};
  for (const Overlap overlap : overlaps) {
    ess.overlap = overlap;
    rigs.push_back(std::make_unique<LatentRig>(Packed(kernels), ess));
  }
  rigs.push_back(std::make_unique<LatentRig>(Packed(kernels), ess, "offload-naive"));
  const auto all = [&](const auto& each) {
    each(full);
    for (const auto& rig : rigs) each(*rig);
  };
  const auto compare = [&](const auto& run) {
    const Result want = run(full), first = run(*rigs[0]);
    for (size_t i = 0; i < rigs.size(); ++i) {
      const Result got = i == 0 ? first : run(*rigs[i]);
      for (size_t layer = 0; layer < want.size(); ++layer) {
        for (size_t r = 0; r < want[layer].size(); ++r) {
          INFO("rig " << i << ", layer " << layer << ", row " << r);
          REQUIRE(RelativeError(got[layer][r], want[layer][r]) < 2e-3);
        }
      }
      if (i < overlaps.size()) REQUIRE(got == first);  // schedules change no bit
    }
  };
  for (int slot = 0; slot < 3; ++slot) {
    all([&](LatentRig& rig) { REQUIRE(rig.Admit(slot, slot + 5u, 0, 500, 64 * (4 + slot))); });
    for (int chunk = 0; chunk < 4 + slot; ++chunk) {
      compare([&](LatentRig& rig) { return rig.Prompt(slot, 64); });
    }
    all([&](LatentRig& rig) {
      if (rig.policy().NeedsEndPrompt()) rig.EndPrompt(slot);
    });
  }
  for (int step = 0; step < 40; ++step) {
    compare([](LatentRig& rig) { return rig.Step({0, 1, 2}); });
  }
  for (const PolicyStatistics::Layer& layer : rigs[0]->policy().Statistics().layers) {
    REQUIRE(layer.missing > 40);
    REQUIRE(layer.missing < layer.selected / 2);
  }
  // The sequence is kept, and warmed from its host cache with hints.
  all([&](LatentRig& rig) {
    const int length = rig.position(0);
    REQUIRE(rig.policy().ReserveHostCopy(0, length, {}));
    rig.policy().Evict(0, length);
    rig.AwaitWarm(0);
    std::unique_ptr<SequenceCache> home = rig.policy().DetachHostCache(0);
    rig.Readmit(0, 5, length, 500, length, std::move(home));
    if (rig.policy().NeedsEndPrompt()) rig.EndPrompt(0, rig.Hints(5, length, 2));
  });
  for (int step = 0; step < 10; ++step) {
    compare([](LatentRig& rig) { return rig.Step({2, 0}); });
  }
}

TEST_CASE("ess: what full gives, of packed entries") { CheckAgainstFull("portable"); }
TEST_CASE("ess: what full gives, of packed entries (cuda)", "[cuda]") { CheckAgainstFull("cuda"); }

// Two of three sequences draft in every step, one of them wrongly, and all must give what they give
// without drafts. A later row reads entries that an earlier row of its sequence has arriving.
void CheckDrafts(const std::string& kernels) {
  if (!IsHere(kernels)) return;
  PolicyOptions::Ess ess;
  ess.sparse_memory_ratio = 0.2;
  ess.least_places = 0;
  LatentRig::Shape shape = Packed(kernels);
  shape.top_k = 32;
  shape.rows_per_sequence = 4;
  const auto begin = [&](LatentRig& rig) {
    for (int slot = 0; slot < 3; ++slot) {
      REQUIRE(rig.Admit(slot, static_cast<uint64_t>(slot) + 5, 0, 500, 64 * (slot + 4)));
      for (int chunk = 0; chunk < 4 + slot; ++chunk) rig.Prompt(slot, 64);
      rig.EndPrompt(slot);
    }
  };
  const auto row_of = [](const Result& result, size_t row) {
    std::vector<std::vector<float>> out;
    for (const auto& layer : result) out.push_back(layer[row]);
    return out;
  };
  ess.overlap = Overlap::kNone;
  LatentRig plain(shape, ess);
  begin(plain);
  std::vector<Result> want;
  for (int step = 0; step < 60; ++step) want.push_back(plain.Step({0, 1, 2}));
  for (const PolicyStatistics::Layer& layer : plain.policy().Statistics().layers) {
    REQUIRE(layer.missing > layer.steps);
  }
  for (const Overlap overlap : {Overlap::kNone, Overlap::kDa, Overlap::kDba}) {
    ess.overlap = overlap;
    LatentRig rig(shape, ess);
    begin(rig);
    std::vector<size_t> done(3, 0);
    for (int step = 0; step < 20; ++step) {
      // Slot 0 accepts step % 4 of its three drafts, slot 1 both of its two.
      const size_t good = 1 + static_cast<size_t>(step % 4);
      std::vector<bool> wrong(8, false);
      for (size_t i = good; i < 4; ++i) wrong[i] = true;
      const Result got = rig.Step({0, 0, 0, 0, 1, 1, 1, 2}, wrong);
      rig.TakeBack(0, 4 - static_cast<int>(good));
      const auto check = [&](size_t slot, size_t first, size_t count) {
        for (size_t i = 0; i < count; ++i, ++done[slot]) {
          INFO("schedule " << static_cast<int>(overlap) << ", step " << step << ", slot " << slot
                           << ", row " << i);
          const bool same = row_of(got, first + i) == row_of(want[done[slot]], slot);
          REQUIRE(same);
        }
      };
      check(0, 0, good);
      check(1, 4, 3);
      check(2, 7, 1);
    }
  }
}

TEST_CASE("ess: drafts change no bit, of packed entries") { CheckDrafts("portable"); }
TEST_CASE("ess: drafts change no bit, of packed entries (cuda)", "[cuda]") { CheckDrafts("cuda"); }

// One layer with the heads, the selection and the pool ratio of DeepSeek-V3.2, past 8K tokens.
void CheckLongContext(const LatentRig::Shape& shape) {
  constexpr int kChunk = 64, kChunks = 130, kTokens = kChunk * kChunks, kSteps = 12;
  PolicyOptions::Ess ess;
  ess.sparse_memory_ratio = 0.2;
  ess.least_places = shape.top_k + 64;
  ess.overlap = Overlap::kDa;
  LatentRig full(shape, {}, "full"), rig(shape, ess);
  for (LatentRig* each : {&full, &rig}) {
    REQUIRE(each->Admit(0, TestSeed(), 0, kTokens + kSteps, kTokens));
    for (int chunk = 0; chunk + 1 < kChunks; ++chunk) each->Prompt(0, kChunk);
  }
  const auto compare = [&](const auto& run) {
    const Result want = run(full), got = run(rig);
    for (size_t layer = 0; layer < want.size(); ++layer) {
      for (size_t r = 0; r < want[layer].size(); ++r) {
        INFO("layer " << layer << ", row " << r);
        REQUIRE(RelativeError(got[layer][r], want[layer][r]) < 2e-3);
      }
    }
  };
  compare([](LatentRig& each) { return each.Prompt(0, kChunk); });
  for (LatentRig* each : {&full, &rig}) {
    if (each->policy().NeedsEndPrompt()) each->EndPrompt(0);
  }
  for (int step = 0; step < kSteps; ++step) {
    compare([](LatentRig& each) { return each.Step({0}); });
  }
  for (const PolicyStatistics::Layer& layer : rig.policy().Statistics().layers) {
    CHECK(layer.missing > 0);
    CHECK(layer.missing < layer.selected / 2);
  }
}

TEST_CASE("ess: what full gives, of packed entries, at 8K tokens (cuda)", "[cuda]") {
  if (!IsHere("cuda")) return;
  LatentRig::Shape shape = Packed("cuda");
  shape.layers = 1;
  shape.top_k = 2048;
  shape.max_context = 8704;
  shape.drift = 0.02;
  shape.pool_bytes = size_t{64} << 20;
  CheckLongContext(shape);
}

// Runs steps of three sequences, two of which outgrow their pools. Returns the results, and how
// often a step was recorded again.
std::pair<std::vector<Result>, int> RunRecorded(const std::string& kernels, Overlap overlap) {
  PolicyOptions::Ess ess;
  ess.sparse_memory_ratio = 0.2;
  ess.least_places = 96;
  ess.overlap = overlap;
  // According to the profile nothing is missed, and misses can be hidden beneath attention.
  ess.profile.points.push_back({.context = 640, .ratio = 0.2, .batch = 3, .by_layer = {0, 0}});
  StageRates& rates = ess.profile.rates;
  rates.device = kernels == "cuda" ? "cuda" : "cpu";
  rates.transfer = {0, 5};
  rates.attend = {50, 0};
  rates.prepare = rates.index = rates.update_residency = {1, 0};
  rates.branch_us = 3;
  LatentRig rig(Packed(kernels), ess);
  for (int slot = 0; slot < 3; ++slot) {
    REQUIRE(rig.Admit(slot, static_cast<uint64_t>(slot) + 5, 0, 480, 64 * (slot + 1)));
    for (int chunk = 0; chunk <= slot; ++chunk) rig.Prompt(slot, 64);
    rig.EndPrompt(slot);
  }
  std::vector<Result> all;
  if (overlap == Overlap::kLayerWise) REQUIRE(rig.policy().DescribeSteps(3) == "none 0-1");
  for (int step = 0; step < 260; ++step) all.push_back(rig.Step({0, 1, 2}));
  for (const PolicyStatistics::Layer& layer : rig.policy().Statistics().layers) {
    REQUIRE(layer.missing > 2 * layer.steps);  // the profile was wrong
  }
  return {all, rig.recordings()};
}

void CheckRecordedAgain(const std::string& kernels) {
  if (!IsHere(kernels)) return;
  const auto [want, none] = RunRecorded(kernels, Overlap::kNone);
  REQUIRE(none == 0);
  const auto [got, recordings] = RunRecorded(kernels, Overlap::kLayerWise);
  REQUIRE(recordings > 0);
  REQUIRE(got == want);
}

TEST_CASE("ess: steps recorded again with other schedules change no bit, of packed entries") {
  CheckRecordedAgain("portable");
}
TEST_CASE("ess: steps recorded again with other schedules change no bit, of packed entries (cuda)",
          "[cuda]") {
  CheckRecordedAgain("cuda");
}

}  // namespace
}  // namespace sluice
