// Co-attention in which the device takes parts of the lists while the round goes on.
#include <catch2/catch.hpp>

#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/device/sim/sim_device.h"
#include "tests/test_main.h"
#include "tests/unit/attention/co_attention_faults.h"
#include "tests/unit/attention/co_attention_world.h"

namespace sluice::co_attention {
namespace {

using kernels::DType;

// Returns a shape whose lists have up to 32 parts.
Shape Pulled(int unit_tokens = 16, DType type = DType::kBFloat16) {
  Shape shape;
  shape.layers = 2;
  shape.max_blocks = 40;
  shape.unit_tokens = unit_tokens;
  shape.capacity = 400 / unit_tokens;
  shape.type = type;
  shape.part_bytes = 1;
  shape.pullers = 3;
  return shape;
}

// Returns the tokens that were attended to by either side since the world was made.
int64_t Attended(const World& world) {
  return world.PulledTokens() + world.co_attention->workers().Statistics().tokens;
}

void EveryShape(Device& device, const KernelTable& table) {
  const uint64_t seed = TestSeed();
  for (const int workers : {1, 3}) {
    for (const int unit_tokens : {16, 1}) {
      for (const DType type : {DType::kBFloat16, DType::kFloat32}) {
        for (const int64_t part_bytes : {1, 4096, 1 << 20}) {  // the last: one part for each list
          Shape shape = Pulled(unit_tokens, type);
          shape.workers = workers;
          shape.part_bytes = part_bytes;
          World world(device, table, shape, seed + static_cast<uint64_t>(workers));
          int64_t asked = 0;
          for (int step = 0; step < 4; ++step) {
            const int rows = 8 - step;
            world.Draw(rows);
            world.Step(rows);
            world.Check(rows, ToleranceOf(table));
            asked += world.UnitsAsked(rows) * unit_tokens;
          }
          CHECK(world.Failed().empty());
          CHECK(Attended(world) == asked);
        }
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("the device and the workers attend to each part of random lists once",
                          EveryShape)

// The numbers of asks go on from program to program.
void Replays(Device& device, const KernelTable& table) {
  World world(device, table, Pulled(), TestSeed());
  ReplaySteps(world, device, ToleranceOf(table));
}
SLUICE_TEST_ON_EVERY_PATH("recorded steps pull round after round", Replays)

// The only worker sleeps with the first part that it claimed, if it comes to claim any.
void AllByDevice(Device& device, const KernelTable& table) {
  Shape shape = Pulled();
  shape.workers = 1;
  shape.layers = 1;
  World world(device, WithFaults(table), shape, TestSeed());
  const NoFaultAtTheEnd no_fault;
  // CUDA loads a kernel when it is first launched, and may wait then for those that run: for one
  // that waits for the worker, which sleeps until all are launched.
  world.DrawWhole(6);
  world.Step(6);
  for (int step = 0; step < 5; ++step) {
    world.DrawWhole(6);
    for (int r = 0; r < 6; ++r) world.positions[static_cast<size_t>(r)] = world.LastPosition() - r;
    do {
      world.DrawLists(6);
    } while (world.PartsAsked(6).first < 40);
    const int64_t before = world.PulledTokens();
    const int64_t asked = world.UnitsAsked(6) * shape.unit_tokens;
    asleep = false;
    fault = Fault::kSleepOnce;
    world.Enqueue(*world.stream, 6);
    // A part has one unit here.
    const absl::Time give_up = absl::Now() + absl::Seconds(30);
    const auto missing = [&] { return asked - (world.PulledTokens() - before); };
    while (missing() > shape.unit_tokens && absl::Now() < give_up) std::this_thread::yield();
    CHECK(missing() <= shape.unit_tokens);
    fault = Fault::kNone;
    world.Wait();
    world.Check(6, ToleranceOf(table));
  }
  CHECK(world.Failed().empty());
}
SLUICE_TEST_ON_EVERY_PATH("the device takes everything that a slow worker has not claimed",
                          AllByDevice)

void OneListOrNone(Device& device, const KernelTable& table) {
  Shape shape = Pulled();
  World world(device, table, shape, TestSeed());
  int64_t asked = 0;
  for (int step = 0; step < 12; ++step) {
    world.DrawWhole(6);
    world.positions[2] = world.LastPosition();
    world.DrawOneList(6, step % 3 == 0 ? -1 : 2, step % 2);
    world.Step(6);
    world.Check(6, ToleranceOf(table));
    asked += world.UnitsAsked(6) * shape.unit_tokens;
    CHECK(Attended(world) == asked);
  }
  CHECK(world.Failed().empty());
}
SLUICE_TEST_ON_EVERY_PATH("the two sides share one giant list, and nothing at all", OneListOrNone)

TEST_CASE("a simulated device cannot pull, because it has one thread") {
  CoAttention::Options options;
  options.workers = 2;
  options.slots = options.max_rows = 4;
  options.layers = options.kv_heads = options.heads = options.pullers = 1;
  options.head_dim = options.unit_tokens = 16;
  options.capacity = 8;
  SimClock clock;
  SimDeviceOptions simulated;
  simulated.kernels = kernels::FindKernelTable("portable");
  const auto device = NewSimDevice(simulated, &clock);
  options.device = device.get();
  const absl::Status refused = CoAttention::Create(options).status();
  CHECK(absl::IsUnimplemented(refused));
  CHECK_THAT(std::string(refused.message()), Catch::Contains("device sim"));
}

#ifndef SLUICE_NO_FAILPOINTS

void AllByWorkers(Device& device, const KernelTable& table) {
  Shape shape = Pulled();
  shape.layers = 1;
  World world(device, table, shape, TestSeed());
  world.DrawWhole(6);
  const ScopedFailpoints armed("attention.arbiter=delay(1s)*1");
  world.Step(6);
  world.Check(6, ToleranceOf(table));
  CHECK(world.PulledTokens() == 0);
  CHECK(world.Failed().empty());
}
SLUICE_TEST_ON_EVERY_PATH("the workers take everything before the arbiter has answered",
                          AllByWorkers)

// The arbiter meets the fault at its first answer, or after some.
void MeetFault(World& world, const std::string& term, const char* health, double tolerance) {
  world.DrawWhole(6);
  for (int r = 0; r < 6; ++r) world.positions[static_cast<size_t>(r)] = world.LastPosition() - r;
  do {
    world.DrawLists(6);
  } while (world.PartsAsked(6).first < 40);
  {
    const ScopedFailpoints armed(term);
    world.Step(6);
  }
  REQUIRE(world.Failed().size() == 6);
  const absl::Status status = world.co_attention->workers().Health(0);
  CHECK(ReasonOf(status) == "WORKER_FAILED");
  CHECK_THAT(std::string(status.message()), Catch::EndsWith(health));
  const int64_t pulled = world.PulledTokens();
  for (int slot = 0; slot < 6; ++slot) world.co_attention->workers().Join(slot);
  for (int step = 0; step < 10; ++step) {
    world.Draw(8);
    world.Step(8);
    world.Check(8, tolerance);
    REQUIRE(world.Failed().empty());
  }
  CHECK(world.PulledTokens() == pulled);
  CHECK(world.co_attention->workers().Statistics().workers == world.shape.workers);
}

void Faults(Device& device, const KernelTable& table) {
  struct Case {
    std::string term;
    const char* health;
  };
  const Case cases[] = {{"attention.arbiter_exit=error", "has died"},
                        {"attention.arbiter=error", "failed"},
                        {"attention.arbiter=delay(3s)", "did not answer in time"}};
  for (const Case& c : cases) {
    for (const char* when : {"*1", "*1@2"}) {  // each puller asks once at least
      INFO(c.term << when);
      Shape shape = Pulled();
      shape.layers = 1;
      shape.deadline = absl::Seconds(1);
      World world(device, table, shape, TestSeed());
      MeetFault(world, c.term + when, c.health, ToleranceOf(table));
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("an arbiter that dies, fails or is late ends sequences, and no later one",
                          Faults)

void WorkerDies(Device& device, const KernelTable& table) {
  Shape shape = Pulled();
  World world(device, table, shape, TestSeed());
  world.DrawWhole(6);
  {
    const ScopedFailpoints armed("attention.worker_exit=error*1");
    world.Step(6);
  }
  const std::vector<int> lost = world.Failed();
  REQUIRE_FALSE(lost.empty());
  CHECK(lost == GroupOf(lost.front(), shape, 2));
  world.Check(6, ToleranceOf(table));
  for (const int slot : lost) world.co_attention->workers().Join(slot);
  const int64_t pulled = world.PulledTokens();
  // The device goes on, and gets something sooner or later.
  const absl::Time give_up = absl::Now() + absl::Seconds(30);
  for (int step = 0; step < 20 || (world.PulledTokens() == pulled && absl::Now() < give_up);
       ++step) {
    world.Draw(8);
    world.Step(8);
    world.Check(8, ToleranceOf(table));
  }
  CHECK(world.Failed().empty());
  CHECK(world.PulledTokens() > pulled);
}
SLUICE_TEST_ON_EVERY_PATH("a worker that dies beside the device ends its group's sequences alone",
                          WorkerDies)

#endif

}  // namespace
}  // namespace sluice::co_attention
