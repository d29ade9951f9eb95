// Tests policy ess with a mover by way of the CPU: it gives the bits of the device's own reads, and
// a worker that fails, dies or is late ends the sequences that it serves alone.
#include <algorithm>
#include <catch2/catch.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/attention/policies/ess/ess_options.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "tests/unit/attention/latent_rig.h"

namespace sluice {
namespace {

using testing::LatentRig;
using Mover = PolicyOptions::Mover;
using Overlap = PolicyOptions::Ess::Overlap;
using Result = std::vector<std::vector<std::vector<float>>>;

PolicyOptions::Ess SmallPools(Mover mover, Overlap overlap = Overlap::kDa) {
  PolicyOptions::Ess ess;
  ess.sparse_memory_ratio = 0.2;
  ess.least_places = 48;
  ess.overlap = overlap;
  ess.mover = mover;
  return ess;
}

// The third slot's prompt is computed here, beside steps of the others.
Result Run(const PolicyOptions::Ess& ess, int row_bucket, const std::string& name) {
  LatentRig::Shape shape;
  shape.row_bucket = row_bucket;
  shape.drift = 0.1;
  LatentRig rig(shape, ess, name);
  Result all;
  const auto add = [&all](const Result& got) { all.insert(all.end(), got.begin(), got.end()); };
  for (int slot = 0; slot < 2; ++slot) {
    const auto seed = static_cast<uint64_t>(slot) + 5;
    REQUIRE(rig.Admit(slot, seed, 150 + 30 * slot, 400));
    rig.EndPrompt(slot, rig.Hints(seed, 150 + 30 * slot, 4));
  }
  REQUIRE(rig.Admit(2, 9, 0, 300, 100));
  for (int chunk = 0; chunk < 4; ++chunk) add(rig.Mixed({0, 1}, 2, 25));
  rig.EndPrompt(2);
  for (int step = 0; step < 20; ++step) add(rig.Step({0, 1, 2}));
  const bool by_cpu = ess.mover == Mover::kCpu;
  REQUIRE(rig.policy().Workers().workers == (by_cpu ? shape.workers : 0));
  REQUIRE(rig.policy().Link().mover == (by_cpu ? 1 : 0));
  if (by_cpu) {
    REQUIRE(rig.policy().Workers().duty == WorkerDuty::kGather);
    REQUIRE(rig.policy().Workers().tokens > 0);
  }
  return all;
}

TEST_CASE("ess: a mover by way of the CPU gives the device's bits under every schedule") {
  for (const std::string name : {"ess", "offload-naive"}) {
    const Result want = Run(SmallPools(Mover::kUva, Overlap::kNone), 0, name);
    for (const Overlap overlap :
         {Overlap::kNone, Overlap::kDa, Overlap::kDba, Overlap::kLayerWise}) {
      REQUIRE(Run(SmallPools(Mover::kCpu, overlap), 0, name) == want);
      REQUIRE(Run(SmallPools(Mover::kCpu, overlap), 4, name) == want);
    }
  }
}

TEST_CASE("ess: with entries brought for the next step, both movers give the same bits") {
  PolicyOptions::Ess ess = SmallPools(Mover::kUva, Overlap::kDba);
  ess.prefetch = 12;
  const Result want = Run(ess, 4, "ess");
  ess.mover = Mover::kCpu;
  REQUIRE(Run(ess, 4, "ess") == want);
}

TEST_CASE("ess: auto is the device's own reads where nothing lies across a link") {
  LatentRig rig({}, SmallPools(Mover::kAuto));
  REQUIRE(rig.policy().Workers().workers == 0);
  REQUIRE(rig.policy().Link().mover == 0);
  REQUIRE(rig.policy().Link().bytes_per_s == std::array<double, 2>{});
}

TEST_CASE("ess: pools that never miss have no workers") {
  PolicyOptions::Ess ess = SmallPools(Mover::kCpu);
  ess.least_places = LatentRig::Shape().max_context + 1;
  LatentRig rig({}, ess);
  REQUIRE(rig.policy().Workers().workers == 0);
}

TEST_CASE("ess: a mover by way of the CPU needs workers") {
  const LatentRig rig({}, SmallPools(Mover::kUva));
  PolicyOptions options = rig.Options();
  options.workers = 0;
  REQUIRE(CheckEssOptions(options).ok());
  options.ess.mover = Mover::kCpu;
  const absl::Status status = CheckEssOptions(options);
  REQUIRE(absl::IsInvalidArgument(status));
  REQUIRE_THAT(std::string(status.message()), Catch::StartsWith("policy_workers: "));
}

#ifndef SLUICE_NO_FAILPOINTS

struct Lived {
  std::vector<Result> rows;  // by slot: what it gave while it was healthy
  std::vector<int> lost;
};

// Decodes three sequences while a worker meets the fault; slots 0 and 2 share a group.
Lived Decode(const std::string& fault, Overlap overlap, absl::Duration deadline) {
  LatentRig::Shape shape;
  shape.drift = 0.1;
  shape.row_bucket = 4;
  shape.worker_deadline = deadline;
  LatentRig rig(shape, SmallPools(Mover::kCpu, overlap));
  const auto admit = [&rig](int slot) {
    const auto seed = static_cast<uint64_t>(slot) + 5;
    REQUIRE(rig.Admit(slot, seed, 150, 400));
    rig.EndPrompt(slot, rig.Hints(seed, 150, 4));
    rig.AwaitWarm(slot);
  };
  for (int slot = 0; slot < 3; ++slot) admit(slot);
  Lived out;
  out.rows.resize(3);
  std::vector<int32_t> live = {0, 1, 2};
  {
    const ScopedFailpoints armed(fault.empty() ? "attention.worker=off" : fault.c_str());
    for (int step = 0; step < 12 && !live.empty(); ++step) {
      const Result got = rig.Step(live);
      std::vector<int32_t> still;
      for (size_t r = 0; r < live.size(); ++r) {
        const int slot = live[r];
        const absl::Status health = rig.policy().SlotHealth(slot);
        if (!health.ok()) {
          REQUIRE(absl::IsInternal(health));
          REQUIRE(ReasonOf(health) == "TRANSFER_FAILED");
          rig.policy().Release(slot);
          out.lost.push_back(slot);
          continue;
        }
        for (const auto& layer : got) {
          out.rows[static_cast<size_t>(slot)].push_back({layer[r]});
        }
        still.push_back(slot);
      }
      live = std::move(still);
    }
  }
  if (absl::StrContains(fault, "delay")) absl::SleepFor(absl::Seconds(3));  // It is back by then.
  // The slots serve other sequences.
  for (const int slot : out.lost) {
    admit(slot);
    for (int step = 0; step < 3; ++step) rig.Step({slot});
    REQUIRE(rig.policy().SlotHealth(slot).ok());
    rig.policy().Release(slot);
  }
  return out;
}

void CheckFault(const Lived& want, const std::string& fault, Overlap overlap,
                absl::Duration deadline = absl::Seconds(60)) {
  INFO(fault);
  const Lived got = Decode(fault, overlap, deadline);
  REQUIRE((got.lost == std::vector<int>{0, 2} || got.lost == std::vector<int>{1}));
  for (size_t slot = 0; slot < 3; ++slot) {
    const Result& rows = got.rows[slot];
    REQUIRE(rows.size() <= want.rows[slot].size());
    REQUIRE(std::equal(rows.begin(), rows.end(), want.rows[slot].begin()));
    const bool lost = std::count(got.lost.begin(), got.lost.end(), static_cast<int>(slot)) > 0;
    REQUIRE((rows.size() < want.rows[slot].size()) == lost);
  }
}

TEST_CASE("ess: a worker of the mover that fails or dies ends the sequences that it serves") {
  for (const Overlap overlap : {Overlap::kDa, Overlap::kDba}) {
    const Lived want = Decode("", overlap, absl::Seconds(60));
    REQUIRE(want.lost.empty());
    for (const char* fault : {"attention.worker=error*1@", "attention.worker_exit=error*1@"}) {
      for (const int hits : {0, 1, 4, 11}) CheckFault(want, absl::StrCat(fault, hits), overlap);
    }
  }
}

TEST_CASE("ess: a worker of the mover that stalls ends the sequences that it serves") {
  const Lived want = Decode("", Overlap::kDba, absl::Seconds(60));
  for (const int hits : {0, 5}) {
    CheckFault(want, absl::StrCat("attention.worker=delay(3s)*1@", hits), Overlap::kDba,
               absl::Seconds(1));
  }
}

#endif

}  // namespace
}  // namespace sluice
