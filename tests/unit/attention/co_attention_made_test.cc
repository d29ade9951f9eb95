// Co-attention whose lists workers make in the rounds that attend to them.
#include <catch2/catch.hpp>

#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "tests/test_main.h"
#include "tests/unit/attention/co_attention_faults.h"
#include "tests/unit/attention/co_attention_world.h"

namespace sluice::co_attention {
namespace {

// Returns a shape whose lists have up to 25 parts, with `pullers` of the device.
Shape Made(int pullers = 0) {
  Shape shape;
  shape.layers = 2;
  shape.max_blocks = 40;
  shape.capacity = 25;
  shape.part_bytes = 1;
  shape.pullers = pullers;
  shape.makes_lists = true;
  return shape;
}

int64_t Attended(const World& world) {
  return world.PulledTokens() + world.co_attention->workers().Statistics().tokens;
}

// Draws every sequence, late in its context.
void DrawLong(World& world) {
  world.DrawWhole(6);
  for (int r = 0; r < 6; ++r) world.positions[static_cast<size_t>(r)] = world.LastPosition() - r;
  world.DrawLists(6);
}

void EveryShape(Device& device, const KernelTable& table) {
  const uint64_t seed = TestSeed();
  for (const int workers : {1, 2, 7}) {
    for (const int pullers : {0, 3}) {
      for (const int64_t part_bytes : {1, 1 << 20}) {
        Shape shape = Made(pullers);
        shape.workers = workers;
        shape.part_bytes = part_bytes;
        World world(device, table, shape, seed + static_cast<uint64_t>(workers));
        int64_t asked = 0;
        for (int step = 0; step < 10; ++step) {
          const int rows = 1 + step % shape.max_rows;
          world.Draw(rows);
          world.Step(rows);
          world.Check(rows, ToleranceOf(table));
          asked += world.UnitsAsked(rows) * shape.unit_tokens;
        }
        CHECK(world.Failed().empty());
        CHECK(Attended(world) == asked);
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("lists that workers make are attended to as those of the device",
                          EveryShape)

void Replays(Device& device, const KernelTable& table) {
  for (const int pullers : {0, 3}) {
    World world(device, table, Made(pullers), TestSeed());
    ReplaySteps(world, device, ToleranceOf(table));
  }
}
SLUICE_TEST_ON_EVERY_PATH("recorded steps make lists round after round", Replays)

// A worker sleeps over a list. Others attend to all lists but that one meanwhile.
void Waiting(Device& device, const KernelTable& table) {
  constexpr auto kSleep = std::chrono::milliseconds(400);
  Shape shape = Made();
  shape.layers = 1;
  World world(device, table, shape, TestSeed());
  std::atomic<bool> slept{false};
  world.maker->on_task = [&slept, kSleep](int32_t, bool copies) {
    if (copies && !slept.exchange(true)) std::this_thread::sleep_for(kSleep);
  };
  DrawLong(world);
  world.Step(6);
  world.Check(6, ToleranceOf(table));
  CHECK(world.Failed().empty());
  // The sleep counts for the worker that sleeps, and not for another one that waits for it. (The
  // groups have a worker and two.)
  CHECK(world.co_attention->workers().Statistics().busy < absl::FromChrono(kSleep) * 7 / 4);
}
SLUICE_TEST_ON_EVERY_PATH("workers that wait for a list are not busy", Waiting)

// The device attends to lists that are there while others are being made.
void PullsEarly(Device& device, const KernelTable& table) {
  Shape shape = Made(3);
  shape.layers = 1;
  shape.workers = 1;
  World world(device, table, shape, TestSeed());
  std::atomic<int> copied{0};
  std::atomic<bool> pulled{false};
  world.maker->on_task = [&](int32_t, bool copies) {
    if (!copies || ++copied < 12) return;  // the last list
    const absl::Time give_up = absl::Now() + absl::Seconds(30);
    while (world.PulledTokens() == 0 && absl::Now() < give_up) std::this_thread::yield();
    pulled = world.PulledTokens() > 0;
  };
  DrawLong(world);
  do {
    world.DrawLists(6);
  } while (world.PartsAsked(6).first < 60);
  world.Step(6);
  CHECK(pulled.load());
  world.Check(6, ToleranceOf(table));
  CHECK(world.Failed().empty());
}
SLUICE_TEST_ON_EVERY_PATH("the device pulls while lists are still being made", PullsEarly)

// A fault of the worker that has a whole list to copy.
void Throwing(Device& device, const KernelTable& table) {
  for (const int pullers : {0, 3}) {
    Shape shape = Made(pullers);
    shape.workers = 4;  // each group has two
    World world(device, table, shape, TestSeed());
    std::atomic<bool> faulty{true};
    world.maker->on_task = [&](int32_t position, bool copies) {
      if (copies && position == world.LastPosition() - 1 && faulty.exchange(false)) {
        throw std::runtime_error("a worker's fault");
      }
    };
    DrawLong(world);
    const absl::Time before = absl::Now();
    world.Step(6);
    CHECK(absl::Now() - before < shape.deadline / 2);  // nobody waits for what never comes
    CHECK(world.Failed() == GroupOf(1, shape, 2));
    CHECK(ReasonOf(world.co_attention->workers().Health(1)) == "WORKER_FAILED");
    world.Check(6, ToleranceOf(table));
    for (int s = 0; s < shape.slots; ++s) world.co_attention->workers().Join(s);
    for (int step = 0; step < 5; ++step) {
      world.Draw(8);
      world.Step(8);
      world.Check(8, ToleranceOf(table));
    }
    CHECK(world.Failed().empty());
  }
}
SLUICE_TEST_ON_EVERY_PATH("a worker that fails over a list ends its group's sequences alone",
                          Throwing)

void Late(Device& device, const KernelTable& table) {
  for (const int pullers : {0, 3}) {
    Shape shape = Made(pullers);
    shape.layers = 1;
    shape.workers = 4;
    shape.deadline = absl::Seconds(2);
    World world(device, table, shape, TestSeed());
    std::atomic<bool> met{false}, stuck{true}, done{false};
    world.maker->on_task = [&](int32_t position, bool copies) {
      if (!copies || position != world.LastPosition() - 1 || met.exchange(true)) return;
      while (stuck.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      done = true;
    };
    DrawLong(world);
    const absl::Time before = absl::Now();
    world.Step(6);
    CHECK(absl::Now() - before > shape.deadline);
    CHECK(world.Failed() == GroupOf(1, shape, 2));
    CHECK(world.co_attention->workers().Health(1).message() ==
          "a CPU worker that attends to this sequence did not answer in time");
    world.Check(6, ToleranceOf(table));
    // Neither those that waited for it nor the arbiter are to blame.
    CHECK(world.co_attention->workers().Statistics().late == 1);
    stuck = false;
    while (!done.load()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until it has polled
    for (int s = 0; s < shape.slots; ++s) world.co_attention->workers().Join(s);
    const int64_t pulled = world.PulledTokens();
    const absl::Time give_up = absl::Now() + absl::Seconds(30);
    for (int step = 0;
         step < 10 || (pullers > 0 && world.PulledTokens() == pulled && absl::Now() < give_up);
         ++step) {
      world.Draw(8);
      world.Step(8);
      world.Check(8, ToleranceOf(table));
    }
    CHECK(world.Failed().empty());
    CHECK((world.PulledTokens() > pulled) == (pullers > 0));
  }
}
SLUICE_TEST_ON_EVERY_PATH("a worker that is late with a list ends its group's sequences alone",
                          Late)

#ifndef SLUICE_NO_FAILPOINTS

// A worker dies with its first task, or with a later one; a list has four.
void Dying(Device& device, const KernelTable& table) {
  for (const int pullers : {0, 3}) {
    for (const char* when : {"", "@3", "@9", "@17"}) {
      INFO(pullers << " pullers, " << when);
      World world(device, table, Made(pullers), TestSeed());
      DrawLong(world);
      {
        const ScopedFailpoints armed(std::string("attention.worker_exit=error*1") + when);
        const absl::Time before = absl::Now();
        world.Step(6);
        CHECK(absl::Now() - before < world.shape.deadline / 2);
      }
      const std::vector<int> lost = world.Failed();
      REQUIRE_FALSE(lost.empty());
      CHECK(lost == GroupOf(lost.front(), world.shape, 2));
      world.Check(6, ToleranceOf(table));
      for (const int slot : lost) world.co_attention->workers().Join(slot);
      for (int step = 0; step < 10; ++step) {
        world.Draw(8);
        world.Step(8);
        world.Check(8, ToleranceOf(table));
      }
      CHECK(world.Failed().empty());
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("a worker that dies over a list ends its group's sequences alone", Dying)

#endif

TEST_CASE("on the simulated device every fault leaves lists of other sequences right") {
  const FaultCounts counts = SimulateFaults(Made(), 40, 20);
  CHECK(counts.failed > 30);
  CHECK(counts.checked > 40 * 20 * 3);
}

}  // namespace
}  // namespace sluice::co_attention
