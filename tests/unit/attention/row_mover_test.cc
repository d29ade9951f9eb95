#include "src/attention/offload/row_mover.h"

#include <catch2/catch.hpp>

#include "absl/strings/str_cat.h"
#include "src/attention/offload/mover_choice.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/device/mailbox.h"
#include "src/device/sim/sim_device.h"
#include "tests/support/device.h"
#include "tests/test_main.h"
#include "tests/unit/attention/row_mover_world.h"

namespace sluice::row_mover {
namespace {

using Mover = PolicyOptions::Mover;

void OnDevice(const std::string& name, void (*test)(Device&)) {
  const auto device = testing::TestDevice(name);
  if (absl::IsNotFound(device.status())) return SkipTest(std::string(device.status().message()));
  REQUIRE(device.ok());
  test(**device);
}
#define SLUICE_TEST_ON_CPU_AND_GPU(claim, test)    \
  TEST_CASE(claim) { OnDevice("portable", test); } \
  TEST_CASE(claim " (cuda)", "[cuda]") { OnDevice("cuda", test); }

void EveryShape(Device& device) {
  const uint64_t seed = TestSeed();
  for (const Mover kind : {Mover::kUva, Mover::kCpu}) {
    for (const int workers : {1, 2, 3, 7}) {
      Shape shape;
      shape.kind = kind;
      shape.workers = workers;
      shape.kv_heads = workers == 2 ? 1 : 2;
      shape.head_dim = workers == 3 ? 128 : 16;
      World world(device, shape, seed + static_cast<uint64_t>(workers));
      for (int step = 0; step < 12; ++step) {
        const int rows = 1 + step % shape.max_rows;
        world.Draw(rows);
        world.Step(rows);
        world.Check(rows);
      }
      CHECK(world.Failed().empty());
    }
  }
}
SLUICE_TEST_ON_CPU_AND_GPU("both movers bring every row of random lists, and touch nothing else",
                           EveryShape)

Shape LatentEntries() {
  Shape shape;
  shape.kv_heads = shape.parts = 1;
  shape.head_dim = 328;  // 656 bytes
  return shape;
}

// The rings have room for two bundles of each worker, so that workers wait for the device.
void SmallRings(Device& device) {
  for (const Mover kind : {Mover::kUva, Mover::kCpu}) {
    for (const int workers : {1, 2, 5}) {
      Shape shape = LatentEntries();
      shape.kind = kind;
      shape.workers = workers;
      shape.ring_bytes = 1;
      World world(device, shape, TestSeed() + static_cast<uint64_t>(workers));
      for (int step = 0; step < 12; ++step) {
        const int rows = 1 + step % shape.max_rows;
        world.Draw(rows, step % 4 == 0 ? shape.capacity : 0);  // full lists, now and then
        world.Step(rows);
        world.Check(rows);
      }
      CHECK(world.Failed().empty());
    }
  }
}
SLUICE_TEST_ON_CPU_AND_GPU("both movers bring latent entries, through rings far smaller than lists",
                           SmallRings)

void Skipped(Device& device) {
  for (const Mover kind : {Mover::kUva, Mover::kCpu}) {
    Shape shape = LatentEntries();
    shape.kind = kind;
    World world(device, shape, TestSeed());
    world.Draw(8, 20);
    world.Skip(3);
    world.Step(8);
    world.Check(8);
  }
}
SLUICE_TEST_ON_CPU_AND_GPU("an entry with a negative source is skipped", Skipped)

// Programs of several buckets share the rounds.
void Replays(Device& device) {
  World world(device, Shape{}, TestSeed());
  std::vector<std::unique_ptr<Program>> programs;
  const int buckets[] = {2, 5, 8};
  for (const int rows : buckets) {
    programs.push_back(
        *device.Record(*world.stream, [&world, rows](Stream& s) { world.Enqueue(s, rows); }));
  }
  for (int step = 0; step < 150; ++step) {
    const auto bucket = static_cast<size_t>(step) % std::size(buckets);
    world.Draw(buckets[bucket]);
    programs[bucket]->Run(*world.stream);
    world.Wait();
    world.Check(buckets[bucket]);
  }
  // The host gets far ahead of the stream with the same step again and again.
  for (int step = 0; step < 100; ++step) programs[2]->Run(*world.stream);
  CHECK(world.Failed().empty());
  world.Wait();
}
SLUICE_TEST_ON_CPU_AND_GPU("recorded steps of several buckets gather again and again", Replays)

void Counting(Device& device) {
  Shape shape;
  World world(device, shape, TestSeed());
  int64_t tokens = 0;
  for (int step = 0; step < 5; ++step) {
    world.Draw(8);
    world.Step(8);
    tokens += world.TokensAsked(8);
  }
  const WorkerStatistics did = world.mover->workers()->Statistics();
  CHECK(did.duty == WorkerDuty::kGather);
  CHECK(did.workers == shape.workers);
  CHECK(did.tokens == tokens);
  CHECK(did.busy > absl::ZeroDuration());
  shape.kind = Mover::kUva;
  CHECK(World(device, shape, TestSeed()).mover->workers() == nullptr);
}
SLUICE_TEST_ON_CPU_AND_GPU("every token that workers gather is counted once", Counting)

#ifndef SLUICE_NO_FAILPOINTS

constexpr int kGroups = 2;

// Returns the sequences that share their group with `slot`.
std::vector<int> GroupOf(int slot, const Shape& shape) {
  std::vector<int> out;
  for (int s = slot % kGroups; s < shape.slots; s += kGroups) out.push_back(s);
  return out;
}

// Runs a step in which some worker meets the fault, and returns the sequences that fail.
std::vector<int> MeetFault(World& world, const char* fault) {
  const ScopedFailpoints armed(fault);
  world.Draw(6, /*least=*/20);
  world.Step(6);
  world.Check(6);
  const std::vector<int> lost = world.Failed();
  REQUIRE_FALSE(lost.empty());
  CHECK(lost == GroupOf(lost.front(), world.shape));
  const absl::Status health = world.mover->workers()->Health(lost.front());
  CHECK(absl::IsInternal(health));
  CHECK(ReasonOf(health) == "WORKER_FAILED");
  return lost;
}

void RunWell(World& world, int steps) {
  for (int step = 0; step < steps; ++step) {
    world.Draw(8);
    world.Step(8);
    world.Check(8);
  }
  CHECK(world.Failed().empty());
}

void Failing(Device& device) {
  World world(device, Shape{}, TestSeed());
  const std::vector<int> lost = MeetFault(world, "attention.worker=error*1");
  SlotWorkers& workers = *world.mover->workers();
  CHECK(workers.Health(lost.front()).message() ==
        "a CPU worker that fetches for this sequence failed");
  for (const int slot : lost) world.MoveIn(slot);
  RunWell(world, 10);
  CHECK(workers.Statistics().failed == 1);
  CHECK(workers.Statistics().workers == 3);
}
SLUICE_TEST_ON_CPU_AND_GPU("a worker that fails ends the sequences of its group alone", Failing)

void Dying(Device& device) {
  World world(device, Shape{}, TestSeed());
  const std::vector<int> lost = MeetFault(world, "attention.worker_exit=error*1");
  SlotWorkers& workers = *world.mover->workers();
  CHECK(workers.Health(lost.front()).message() ==
        "a CPU worker that fetches for this sequence has died");
  // Those that come after them are served by the workers that are left.
  for (const int slot : lost) world.MoveIn(slot);
  RunWell(world, 10);
  CHECK(workers.Statistics().left == 1);
  CHECK(workers.Statistics().workers == 2);
  // If no worker is left, no sequence is healthy, and steps end none the less.
  {
    const ScopedFailpoints armed("attention.worker_exit=error");
    world.Draw(6, /*least=*/20);
    world.Step(6);
  }
  for (int slot = 0; slot < world.shape.slots; ++slot) world.MoveIn(slot);
  world.Step(6);
  CHECK(std::ssize(world.Failed()) == world.shape.slots);
  CHECK(workers.Statistics().workers == 0);
}
SLUICE_TEST_ON_CPU_AND_GPU("a worker that dies ends its group's sequences, and no later one", Dying)

// A worker meets the fault before its bundles, in rings that are full or not.
void AtEachPlace(Device& device) {
  const auto meet = [&device](const std::string& fault, const Shape& shape, absl::Duration back) {
    INFO(fault << ", rings of " << shape.ring_bytes << " bytes");
    World world(device, shape, TestSeed());
    const std::vector<int> lost = MeetFault(world, fault.c_str());
    for (const int slot : lost) REQUIRE(world.mover->workers()->AtRest(slot));
    absl::SleepFor(back);
    world.Step(6);  // A late worker is back, or this was its round without it.
    for (const int slot : lost) world.MoveIn(slot);
    RunWell(world, 3);
  };
  for (const int64_t ring_bytes : {int64_t{1}, int64_t{1} << 20}) {
    Shape shape = LatentEntries();
    shape.ring_bytes = ring_bytes;
    for (const char* fault : {"attention.worker_exit=error*1@", "attention.worker=error*1@"}) {
      for (const int hits : {0, 1, 2, 5, 9, 14}) {
        meet(absl::StrCat(fault, hits), shape, absl::ZeroDuration());
      }
    }
    shape.deadline = absl::Seconds(1);
    meet(absl::StrCat("attention.worker=delay(2s)*1@", ring_bytes == 1 ? 7 : 0), shape,
         absl::Milliseconds(1200));
  }
}
SLUICE_TEST_ON_CPU_AND_GPU("a worker that fails, dies or stalls anywhere ends its group alone",
                           AtEachPlace)

void Late(Device& device) {
  Shape shape;
  shape.deadline = absl::Seconds(1);  // a healthy worker keeps it on any machine
  World world(device, shape, TestSeed());
  const absl::Time begin = absl::Now();
  const std::vector<int> lost = MeetFault(world, "attention.worker=delay(3s)*1");
  const absl::Duration step = absl::Now() - begin;
  CHECK(step >= shape.deadline);
  CHECK(step < absl::Seconds(3));
  SlotWorkers& workers = *world.mover->workers();
  CHECK(workers.Health(lost.front()).message() ==
        "a CPU worker that fetches for this sequence did not answer in time");
  // The worker sleeps without holding the round, so the slots become others' at once. It writes
  // nothing when it comes back in the midst of their rounds.
  for (const int slot : lost) CHECK(workers.AtRest(slot));
  while (absl::Now() - begin < absl::Milliseconds(3200)) {
    for (const int slot : lost) world.MoveIn(slot);
    world.Draw(8);
    world.Step(8);
    world.Check(8);
  }
  for (int slot = 0; slot < shape.slots; ++slot) world.MoveIn(slot);
  RunWell(world, 10);
  CHECK(workers.Statistics().workers == 3);
  CHECK(workers.Statistics().late >= 1);
}
SLUICE_TEST_ON_CPU_AND_GPU("a late worker ends its group's sequences, and may come back", Late)

void Refused(Device& device) {
  Shape shape;
  shape.deadline = absl::Seconds(1);
  World world(device, shape, TestSeed());
  const absl::Time begin = absl::Now();
  MeetFault(world, "attention.worker=delay(1500ms)*1");
  const SlotWorkers& workers = *world.mover->workers();
  const int64_t tokens = workers.Statistics().tokens;
  CHECK(tokens < world.TokensAsked(6));
  REQUIRE(absl::Now() - begin < absl::Milliseconds(1500));
  absl::SleepFor(absl::Milliseconds(1700) - (absl::Now() - begin));
  CHECK(workers.Statistics().tokens == tokens);
}
SLUICE_TEST_ON_CPU_AND_GPU("a worker gathers nothing for a round that went on without it", Refused)

void Slow(Device& device) {
  World world(device, Shape{}, TestSeed());
  const auto done = device.NewEvent();
  const ScopedFailpoints armed("attention.worker=delay(300ms)*1");
  world.Draw(6, /*least=*/20);
  world.Enqueue(*world.stream, 6);
  world.stream->Record(*done);
  const absl::Time begin = absl::Now();
  CHECK_FALSE(done->Ready());
  world.Wait();
  CHECK(absl::Now() - begin >= absl::Milliseconds(100));
  CHECK(done->Ready());
  world.Check(6);
  CHECK(world.Failed().empty());
}
SLUICE_TEST_ON_CPU_AND_GPU("a step is not done while a gather of it is under way", Slow)

#endif

TEST_CASE("a simulated device with faults of workers harms only the sequences that it ends") {
  const kernels::KernelTable& table = *kernels::FindKernelTable("portable");
  const uint64_t first = TestSeed() / 4 * 4;
  int failed = 0, checked = 0;
  for (uint64_t seed = first; seed < first + 40; ++seed) {
    SimClock clock;
    SimDeviceOptions options;
    options.kernels = &table;
    options.seed = seed;
    if (seed % 4 == 1) options.worker_failures = 0.01;
    if (seed % 4 == 2) options.late_workers = 0.01;
    if (seed % 4 == 3) options.leaving_workers = 0.001;
    const auto device = NewSimDevice(options, &clock);
    Shape shape;
    shape.deadline = absl::Milliseconds(1);
    World world(*device, shape, seed);
    for (int step = 0; step < 10; ++step) {
      world.Draw(8);
      world.Step(8);
      world.Check(8);
      const std::vector<int> lost = world.Failed();
      failed += static_cast<int>(lost.size());
      checked += shape.slots - static_cast<int>(lost.size());
      if (seed % 4 == 0) REQUIRE(lost.empty());
      for (const int slot : lost) world.MoveIn(slot);
    }
  }
  CHECK(failed > 40);
  CHECK(checked > 40 * 10 * 2);
}

TEST_CASE("movers are measured with units of the whole arena") {
  const auto device = testing::TestDevice("portable");
  REQUIRE(device.ok());
  const World world(**device, LatentEntries(), TestSeed());
  RowMover::Options options = world.MoverOptions();
  const absl::StatusOr<LinkStatistics> measured = MeasureMovers(options, {5000, 5000});
  REQUIRE(measured.ok());
  CHECK(measured->bytes_per_s[0] > 0);
  CHECK(measured->bytes_per_s[1] > 0);
  // There is nothing to write to.
  CHECK(MeasureMovers(options, {5000, options.max_rows - 1})->bytes_per_s[0] == 0);
  options.kind = Mover::kAuto;
  const absl::StatusOr<ChosenMover> chosen = ChooseMover(options, {5000, 5000});
  REQUIRE(chosen.ok());
  CHECK(chosen->link.mover == static_cast<int>(Mover::kUva));
  CHECK(chosen->mover->workers() == nullptr);
}

TEST_CASE("the CPU's rate has to be clearly higher to be chosen") {
  CHECK(FasterMover({-1, {0, 0}}) == Mover::kUva);
  CHECK(FasterMover({-1, {25e9, 25e9}}) == Mover::kUva);
  CHECK(FasterMover({-1, {25e9, 27e9}}) == Mover::kUva);
  CHECK(FasterMover({-1, {25e9, 28e9}}) == Mover::kCpu);
  CHECK(FasterMover({-1, {25e9, 0}}) == Mover::kUva);
}

TEST_CASE("a mover refuses options that are out of range") {
  const auto device = testing::TestDevice("portable");
  REQUIRE(device.ok());
  const World world(**device, Shape{}, TestSeed());
  const auto refused = [&](const char* what, auto change) {
    RowMover::Options options = world.MoverOptions();
    change(options);
    const absl::Status status = RowMover::Create(options).status();
    CHECK(absl::IsInvalidArgument(status));
    CHECK_THAT(std::string(status.message()), Catch::Matchers::Contains(what));
  };
  refused("workers: ", [](RowMover::Options& o) { o.workers = 0; });
  refused("workers: ", [](RowMover::Options& o) { o.workers = Mailbox::kMaxWorkers + 1; });
  refused("a shape is not above 0", [](RowMover::Options& o) { o.capacity = 0; });
  refused("a shape is not above 0", [](RowMover::Options& o) { o.slots = 0; });
  refused("mailbox: ", [](RowMover::Options& o) { o.deadline = absl::ZeroDuration(); });
}

}  // namespace
}  // namespace sluice::row_mover
