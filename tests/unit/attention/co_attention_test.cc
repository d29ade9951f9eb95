#include "src/attention/offload/co_attention.h"

#include <catch2/catch.hpp>

#include "src/attention/offload/worker_share.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "tests/test_main.h"
#include "tests/unit/attention/co_attention_faults.h"
#include "tests/unit/attention/co_attention_world.h"

namespace sluice::co_attention {
namespace {

using kernels::DType;
using kernels::KernelTable;

void EveryShape(Device& device, const KernelTable& table) {
  const uint64_t seed = TestSeed();
  for (const int workers : {1, 2, 3, 7}) {
    for (const int unit_tokens : {16, 1}) {
      for (const DType type : {DType::kBFloat16, DType::kFloat32}) {
        Shape shape;
        shape.workers = workers;
        shape.unit_tokens = unit_tokens;
        shape.capacity = unit_tokens == 1 ? 40 : 5;
        shape.type = type;
        World world(device, table, shape, seed + static_cast<uint64_t>(workers));
        for (int step = 0; step < 10; ++step) {
          const int rows = 1 + step % shape.max_rows;
          world.Draw(rows);
          world.Step(rows);
          world.Check(rows, ToleranceOf(table));
        }
        CHECK(world.Failed().empty());
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("workers attend to random lists as the operator does, to the bit",
                          EveryShape)

// Programs of several buckets share the channels.
void Replays(Device& device, const KernelTable& table) {
  World world(device, table, Shape{}, TestSeed());
  std::vector<std::unique_ptr<Program>> programs;
  const int buckets[] = {2, 5, 8};
  for (const int rows : buckets) {
    programs.push_back(
        *device.Record(*world.stream, [&world, rows](Stream& s) { world.Enqueue(s, rows); }));
  }
  for (int step = 0; step < 600; ++step) {
    const auto bucket = static_cast<size_t>(step) % std::size(buckets);
    world.Draw(buckets[bucket]);
    programs[bucket]->Run(*world.stream);
    world.Wait();
    world.Check(buckets[bucket], ToleranceOf(table));
  }
  // The host gets far ahead of the stream with the same step again and again.
  for (int step = 0; step < 600; ++step) programs[2]->Run(*world.stream);
  CHECK(world.Failed().empty());
  world.Wait();
}
SLUICE_TEST_ON_EVERY_PATH("recorded steps of several buckets run thousands of rounds", Replays)

// Sequence s is row s; sequence 0's row, at the last position there is, meets the fault.
int MeetFault(World& world, Fault what) {
  world.DrawWhole(6);
  world.positions[0] = world.LastPosition();
  do {
    world.DrawLists(6);
  } while (!world.Attends(0));
  fault_row = world.LastPosition();
  fault = what;
  return 0;
}

void Throwing(Device& device, const KernelTable& table) {
  World world(device, WithFaults(table), Shape{}, TestSeed());
  const NoFaultAtTheEnd no_fault;
  const int slot = MeetFault(world, Fault::kThrow);
  world.Step(6);
  fault = Fault::kNone;
  CHECK(world.Failed() == GroupOf(slot, world.shape, 2));
  const absl::Status health = world.co_attention->workers().Health(slot);
  CHECK(absl::IsInternal(health));
  CHECK(health.message() == "a CPU worker that attends to this sequence failed");
  CHECK(ReasonOf(health) == "WORKER_FAILED");
  world.Check(6, ToleranceOf(table));
  // The next sequence in the same slot is served.
  for (int s : GroupOf(slot, world.shape, 2)) world.co_attention->workers().Join(s);
  world.Step(6);
  CHECK(world.Failed().empty());
  world.Check(6, ToleranceOf(table));
}
SLUICE_TEST_ON_EVERY_PATH("a worker that throws ends its group's sequences alone", Throwing)

void Late(Device& device, const KernelTable& table) {
  Shape shape;
  shape.deadline = absl::Seconds(2);  // a healthy worker keeps it on any machine
  World world(device, WithFaults(table), shape, TestSeed());
  const NoFaultAtTheEnd no_fault;
  const int slot = MeetFault(world, Fault::kSleep);
  const absl::Time before = absl::Now();
  world.Step(6);
  CHECK(absl::Now() - before > shape.deadline);
  CHECK(world.Failed() == GroupOf(slot, shape, 2));
  CHECK(world.co_attention->workers().Health(slot).message() ==
        "a CPU worker that attends to this sequence did not answer in time");
  world.Check(6, ToleranceOf(table));
  // While it is away, others' results are right, wherever their rows are, even when it comes back
  // in the midst of them; and requests to it are refused.
  for (int s : world.Failed()) world.co_attention->workers().Join(s);
  for (int step = 0; step < 50; ++step) {
    if (step == 25) fault = Fault::kNone;
    world.Draw(8);
    world.Step(8);
    world.Check(8, ToleranceOf(table));
    if (step < 25) REQUIRE(world.Failed() == GroupOf(slot, shape, 2));
  }
  while (asleep.load()) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until it has polled
  for (int s = 0; s < shape.slots; ++s) world.co_attention->workers().Join(s);
  for (int step = 0; step < 20; ++step) {
    world.Draw(8);
    world.Step(8);
    world.Check(8, ToleranceOf(table));
  }
  CHECK(world.Failed().empty());
  // There may be one channel or two that were under way.
  const int64_t late = world.co_attention->workers().Statistics().late;
  CHECK((late == 1 || late == 2));
}
SLUICE_TEST_ON_EVERY_PATH("a late worker ends its group's sequences, and may come back", Late)

// A page is freed only after its readers are fenced.
void GivenAway(Device& device, const KernelTable& table) {
  Shape shape;
  shape.deadline = absl::Milliseconds(300);
  World world(device, WithFaults(table), shape, TestSeed());
  const NoFaultAtTheEnd no_fault;
  const int slot = MeetFault(world, Fault::kSleep);
  world.Step(6);
  // The sequences of its group have ended, but a worker still reads only one of them.
  REQUIRE(asleep.load());
  REQUIRE_FALSE(world.co_attention->workers().Health(slot).ok());
  CHECK_FALSE(world.co_attention->workers().AtRest(slot));
  CHECK_FALSE(world.co_attention->workers().RestEvent(slot).Ready());
  for (int s = 1; s < shape.slots; ++s) world.co_attention->workers().RestEvent(s).Wait();
  std::thread wakes([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    fault = Fault::kNone;
  });
  world.co_attention->workers().RestEvent(slot).Wait();
  CHECK(world.co_attention->workers().AtRest(slot));
  world.MoveIn(slot);
  wakes.join();
  while (asleep.load()) std::this_thread::yield();
  CHECK_FALSE(foreign.load());
  // The other one is at rest once the worker has polled.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (int s = 0; s < shape.slots; ++s) world.co_attention->workers().Join(s);
  world.DrawWhole(6);
  world.Step(6);
  world.Check(6, ToleranceOf(table));
}
SLUICE_TEST_ON_EVERY_PATH("a slot becomes another's when a late worker has come back, not before",
                          GivenAway)

#ifndef SLUICE_NO_FAILPOINTS

void Dying(Device& device, const KernelTable& table) {
  World world(device, table, Shape{}, TestSeed());
  const auto step = [&] {
    world.DrawWhole(6);
    world.Step(6);
    world.Check(6, ToleranceOf(table));
  };
  step();
  CHECK(world.co_attention->workers().Statistics().workers == 3);
  {
    const ScopedFailpoints armed("attention.worker_exit=error*1");
    step();
  }
  const std::vector<int> lost = world.Failed();
  REQUIRE_FALSE(lost.empty());
  CHECK(lost == GroupOf(lost.front(), world.shape, 2));
  CHECK(world.co_attention->workers().Health(lost.front()).message() ==
        "a CPU worker that attends to this sequence has died");
  // Those that come after them are served by the workers that are left.
  for (int slot : lost) world.co_attention->workers().Join(slot);
  for (int i = 0; i < 20; ++i) step();
  CHECK(world.Failed().empty());
  CHECK(world.co_attention->workers().Statistics().workers == 2);
  CHECK(world.co_attention->workers().Statistics().left == 1);
  // If no worker is left, no sequence is healthy, and steps end none the less.
  {
    const ScopedFailpoints armed("attention.worker_exit=error");
    step();
  }
  for (int slot = 0; slot < world.shape.slots; ++slot) world.co_attention->workers().Join(slot);
  for (int i = 0; i < 20; ++i) step();
  CHECK(world.Failed().size() == 6);
  CHECK(world.co_attention->workers().Statistics().workers == 0);
}
SLUICE_TEST_ON_EVERY_PATH("a worker that dies ends its group's sequences, and no later one", Dying)

void Failing(Device& device, const KernelTable& table) {
  World world(device, table, Shape{}, TestSeed());
  {
    const ScopedFailpoints armed("attention.worker=error*1");
    world.DrawWhole(6);
    world.Step(6);
  }
  world.Check(6, ToleranceOf(table));
  const std::vector<int> lost = world.Failed();
  REQUIRE_FALSE(lost.empty());
  CHECK(lost == GroupOf(lost.front(), world.shape, 2));
  const WorkerStatistics did = world.co_attention->workers().Statistics();
  CHECK(did.failed == 1);
  CHECK(did.workers == 3);
  CHECK(did.busy > absl::ZeroDuration());
}
SLUICE_TEST_ON_EVERY_PATH("the failpoint attention.worker ends the sequences of one group", Failing)

#endif

void Counting(Device& device, const KernelTable& table) {
  World world(device, table, Shape{}, TestSeed());
  int64_t units = 0;
  for (int i = 0; i < 10; ++i) {
    world.Draw(8);
    world.Step(8);
    units += world.UnitsAsked(8);
  }
  CHECK(world.co_attention->workers().Statistics().tokens == units * world.shape.unit_tokens);
}
SLUICE_TEST_ON_EVERY_PATH("every token that workers attend to is counted once", Counting)

TEST_CASE("groups are as large as a sequence has KV heads to share, and two where there can be") {
  const auto groups = [](int workers, int slots, int kv_heads) {
    CoAttention::Options options;
    options.workers = workers;
    options.slots = slots;
    options.kv_heads = kv_heads;
    return CoAttentionGroups(options);
  };
  CHECK(groups(16, 64, 8) == 2);
  CHECK(groups(16, 64, 4) == 4);
  CHECK(groups(16, 64, 2) == 8);
  CHECK(groups(4, 64, 8) == 2);
  CHECK(groups(1, 64, 8) == 1);
  CHECK(groups(16, 1, 8) == 1);
  CHECK(groups(32, 3, 1) == 3);
  CHECK(groups(64, 64, 8) == 8);
}

// Says how many tokens a list holds by formula.
class Formula : public CoAttention::Source {
 public:
  absl::Status Attend(int, const CoAttention::Task&, absl::FunctionRef<bool()>) override {
    return absl::OkStatus();
  }
  void ListTokens(int channel, int slot, int32_t position, int32_t* tokens) const override {
    for (int head = 0; head < kHeads; ++head) tokens[head] = Of(channel, slot, position, head);
  }
  static int32_t Of(int channel, int slot, int32_t position, int head) {
    return (slot * 7 + channel * 3 + head * 5) % 11 == 0 ? position : position / 20 + head;
  }
  static constexpr int kHeads = 8;
};

TEST_CASE("the workers of a group divide lists by the tokens that a source says, each list once") {
  SplitMix64 random(TestSeed());
  Formula source;
  CoAttention::Options options;
  options.slots = options.max_rows = 6;
  options.heads = options.kv_heads = Formula::kHeads;
  options.head_dim = 16;
  options.source = &source;
  for (const int workers : {1, 3, 8, 64}) {
    options.workers = workers;
    std::vector<int32_t> slots, positions;
    for (int32_t slot = 0; slot < options.slots; ++slot) {
      slots.push_back(slot);
      positions.push_back(static_cast<int32_t>(1000 + random.Below(60000)));
    }
    int32_t rows = options.slots;
    CoAttentionSide request;
    request.rows = &rows;
    request.slots = slots.data();
    request.positions = positions.data();
    const uint64_t all = workers == 64 ? ~uint64_t{0} : (uint64_t{1} << workers) - 1;
    constexpr int kChannel = 3;
    std::vector<int> taken(static_cast<size_t>(rows * Formula::kHeads));
    std::vector<PartWords> words(taken.size());
    const PartBoard board(words.data(), nullptr, 1);
    int64_t total = 0, largest_list = 0, largest_share = 0;
    for (int worker = 0; worker < workers; ++worker) {
      WorkerShare share(options);
      share.TakeRows(request, [all](int) { return all; });
      share.Divide(board, request, kChannel, uint64_t{1} << worker);
      int64_t mine = 0;
      for (size_t row = 0; row < share.rows().size(); ++row) {
        for (int head = 0; head < Formula::kHeads; ++head) {
          const size_t list = row * Formula::kHeads + static_cast<size_t>(head);
          if (!share.Begins(list, 0)) continue;
          ++taken[list];
          const int64_t tokens = 16 + Formula::Of(kChannel, slots[row], positions[row], head);
          mine += tokens;
          largest_list = std::max(largest_list, tokens);
        }
      }
      total += mine;
      largest_share = std::max(largest_share, mine);
    }
    CHECK(taken == std::vector<int>(taken.size(), 1));
    // A worker's share is its part of all, give or take half of a list at each end.
    CHECK(largest_share <= total / workers + largest_list);
  }
}

TEST_CASE("on the simulated device every fault leaves the other sequences right, to the bit") {
  const FaultCounts counts = SimulateFaults(Shape(), 60, 30);
  CHECK(counts.failed > 100);
  CHECK(counts.checked > 60 * 30 * 3);
}

}  // namespace
}  // namespace sluice::co_attention
