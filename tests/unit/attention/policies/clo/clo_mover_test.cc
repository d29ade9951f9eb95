#include <catch2/catch.hpp>
#include <map>

#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "tests/test_main.h"
#include "tests/unit/attention/policies/clo/clo_case.h"
#include "tests/unit/attention/policy_traffic.h"

namespace sluice {
namespace {

using testing::MakeClo;
using testing::PolicyRig;
using testing::SumsOf;
using testing::TurningQueries;

using Mover = PolicyOptions::Mover;

// The sequences in company are fetched by way of the CPU, and those alone by the device.
void TrafficOfMovers(const PolicyRig::Shape& of) {
  PolicyRig::Shape shape = of;
  shape.row_bucket = 3;
  testing::CheckTraffic(shape, TurningQueries(shape), [&](const PolicyRig& rig, bool alone) {
    PolicyOptions options = rig.Options();
    options.budget_tokens = 80;
    options.clo.budget_divisor = 4;
    options.clo.mover = alone ? Mover::kUva : Mover::kCpu;
    options.clo.mover_workers = 3;
    return MakeClo(options);
  });
}
SLUICE_TEST_ON_CPU_AND_GPU("clo: a mover by way of the CPU gives the bits of the device's own",
                           TrafficOfMovers)

TEST_CASE("clo: workers of a mover are counted as those that gather") {
  const PolicyRig::Shape shape;
  PolicyRig rig(shape, TurningQueries(shape));
  PolicyOptions options = rig.Options();
  options.budget_tokens = 96;
  CHECK(MakeClo(options)->Workers().workers == 0);
  options.clo.mover = Mover::kCpu;
  const auto policy = MakeClo(options);
  rig.Admit(*policy, 0, TestSeed(), 300, 320);
  for (int step = 0; step < 10; ++step) rig.Step(*policy, {0});
  const WorkerStatistics workers = policy->Workers();
  CHECK(workers.duty == WorkerDuty::kGather);
  CHECK(workers.workers == 4);
  CHECK(workers.tokens == SumsOf(*policy).recalled);
  CHECK(workers.tokens > 0);
  rig.Release(*policy, 0);
}

#ifndef SLUICE_NO_FAILPOINTS

// Decodes all slots while a worker meets `fault`, and returns the rows of the sequences that live
// on, by slot.
std::map<int, testing::Decoded> DecodeWithFault(const PolicyRig::Shape& shape, const char* fault,
                                                absl::Duration deadline) {
  PolicyRig rig(shape, TurningQueries(shape));
  PolicyOptions options = rig.Options();
  options.budget_tokens = 80;
  options.clo.similarity = 1;  // every head misses, so every worker gathers
  options.clo.mover = Mover::kCpu;
  options.worker_deadline = deadline;
  const auto policy = MakeClo(options);
  std::vector<int32_t> slots;
  for (int slot = 0; slot < shape.slots; ++slot) {
    rig.Admit(*policy, slot, TestSeed() + static_cast<uint64_t>(slot), 300 + slot, 400);
    slots.push_back(slot);
  }
  std::map<int, testing::Decoded> decoded;
  const ScopedFailpoints armed(fault);
  for (int step = 0; step < 8; ++step) {
    const auto out = rig.Step(*policy, slots);
    for (size_t row = 0; row < slots.size(); ++row) testing::Add(decoded[slots[row]], out, row);
    // A sequence that its workers failed ends, and its slot becomes another's at once.
    std::erase_if(slots, [&](int slot) {
      const absl::Status health = policy->SlotHealth(slot);
      if (health.ok()) return false;
      CHECK(absl::IsInternal(health));
      CHECK(ReasonOf(health) == "WORKER_FAILED");
      decoded.erase(slot);
      CHECK(policy->Warm(slot));
      rig.Release(*policy, slot);
      rig.Admit(*policy, slot, TestSeed() + 50, 200, 300);
      return true;
    });
  }
  for (int slot = 0; slot < shape.slots; ++slot) rig.Release(*policy, slot);
  CHECK(rig.hbm().UsageOf(0).reserved_bytes == 0);
  CHECK(rig.dram().UsageOf(0).reserved_bytes == 0);
  return decoded;
}

void FaultsOfMovers(const PolicyRig::Shape& shape) {
  constexpr absl::Duration kLong = absl::Seconds(60);
  const auto well = DecodeWithFault(shape, "attention.worker=off", kLong);
  CHECK(std::ssize(well) == shape.slots);
  const auto check = [&](const char* fault, absl::Duration deadline) {
    INFO(fault);
    const auto left = DecodeWithFault(shape, fault, deadline);
    CHECK(std::ssize(left) == shape.slots / 2);
    for (const auto& [slot, rows] : left) CHECK(rows == well.at(slot));
  };
  check("attention.worker=error*1@5", kLong);
  check("attention.worker_exit=error*1@5", kLong);
  check("attention.worker=delay(2s)*1@5", absl::Seconds(1));
  // A worker that is slow, but within the deadline, ends nobody.
  CHECK(DecodeWithFault(shape, "attention.worker=delay(200ms)*1@5", kLong) == well);
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "clo: a fault of a mover's worker ends the sequences of its group, and others keep their bits",
    FaultsOfMovers)

#endif

}  // namespace
}  // namespace sluice
