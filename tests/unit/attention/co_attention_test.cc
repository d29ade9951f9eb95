#include "src/attention/offload/co_attention.h"

#include <catch2/catch.hpp>

#include "src/attention/offload/worker_share.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/device/sim/sim_device.h"
#include "tests/support/device.h"
#include "tests/test_main.h"
#include "tests/unit/attention/co_attention_world.h"

namespace sluice::co_attention {
namespace {

using kernels::DType;
using kernels::KernelTable;
using kernels::SparseAttentionParams;

// A fault that the workers of a test have in place of the kernel, for the row at position `row`.
// kSleepOnce is met by one call of the kernel alone, whatever its row is.
enum class Fault { kNone, kThrow, kSleep, kSleepOnce };
std::atomic<Fault> fault{Fault::kNone};
std::atomic<int> calls{0};  // of the kernel that are done, since WithFaults
std::atomic<int> fault_row{-1};
std::atomic<bool> asleep{false};
// whether what it read became another sequence's before it was done
std::atomic<bool> foreign{false};
void (*kernel)(const SparseAttentionParams&, kernels::Worker) = nullptr;

std::vector<float> ResultOf(const SparseAttentionParams& p) {
  const int64_t group = p.heads / p.cache.kv_heads * int64_t{p.cache.head_dim};
  return {p.o + p.kv_head_begin * group, p.o + p.kv_head_end * group};
}

void SleepOnce(const SparseAttentionParams& p, kernels::Worker worker) {
  kernel(p, worker);
  if (!asleep.exchange(true)) {
    while (fault.load() == Fault::kSleepOnce) std::this_thread::yield();
  }
  ++calls;
}

void Faulty(const SparseAttentionParams& p, kernels::Worker worker) {
  if (fault.load() == Fault::kSleepOnce) return SleepOnce(p, worker);
  if (fault.load() != Fault::kNone && p.positions[0] == fault_row.load()) {
    if (fault.load() == Fault::kThrow) throw std::runtime_error("a worker's fault");
    kernel(p, worker);
    const std::vector<float> o = ResultOf(p);
    asleep = true;
    while (fault.load() == Fault::kSleep) std::this_thread::yield();
    kernel(p, worker);
    if (ResultOf(p) != o) foreign = true;
    asleep = false;
    return;
  }
  kernel(p, worker);
  ++calls;
}

KernelTable WithFaults(const KernelTable& table) {
  KernelTable out = table;
  kernel = table.sparse_attention;
  out.sparse_attention = Faulty;
  fault = Fault::kNone;
  foreign = asleep = false;
  calls = 0;
  return out;
}

// Wakes the workers at the end of a test that ends early, because the team would wait for them. It
// is made after the world, so that it ends before it.
struct NoFaultAtTheEnd {
  ~NoFaultAtTheEnd() { fault = Fault::kNone; }
};

// tests/kernels compares the bits of kernels; this is the tolerance for bf16 queries.
double ToleranceOf(const KernelTable& table) {
  return std::string(table.name) == "amx" || std::string(table.name) == "avx512bf16" ? 3e-2 : 1e-4;
}

void OnPath(const std::string& name, void (*test)(Device&, const KernelTable&)) {
  const auto device = testing::TestDevice(name);
  if (absl::IsNotFound(device.status())) return SkipTest(std::string(device.status().message()));
  REQUIRE(device.ok());
  // Workers are the CPU's, whatever the device is.
  const KernelTable* table = kernels::FindKernelTable(name.c_str());
  if (table == nullptr) table = kernels::AvailableKernelTables().back();
  test(**device, *table);
}
#define SLUICE_TEST_ON_EVERY_PATH(claim, test)                     \
  TEST_CASE(claim " (portable)") { OnPath("portable", test); }     \
  TEST_CASE(claim " (avx2)") { OnPath("avx2", test); }             \
  TEST_CASE(claim " (avx512bf16)") { OnPath("avx512bf16", test); } \
  TEST_CASE(claim " (amx)") { OnPath("amx", test); }               \
  TEST_CASE(claim " (cuda)", "[cuda]") { OnPath("cuda", test); }

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

// Returns a shape whose lists have up to 32 parts, or up to `parts` where that is given.
Shape LongLists(int unit_tokens, DType type, int parts = 0) {
  Shape shape;
  shape.layers = 2;
  shape.max_blocks = 40;
  shape.unit_tokens = unit_tokens;
  shape.capacity = 400 / unit_tokens;
  shape.type = type;
  shape.part_bytes = parts == 0 ? 1 : 400 * 2 * 16 * kernels::SizeOf(type) / parts;
  return shape;
}

void LongEveryShape(Device& device, const KernelTable& table) {
  const uint64_t seed = TestSeed();
  int longest = 0;
  for (const int workers : {1, 3, 7}) {
    for (const int unit_tokens : {16, 1}) {
      for (const DType type : {DType::kBFloat16, DType::kFloat32}) {
        for (const int parts : {0, 5}) {
          Shape shape = LongLists(unit_tokens, type, parts);
          shape.workers = workers;
          World world(device, table, shape, seed + static_cast<uint64_t>(workers));
          for (int step = 0; step < 3; ++step) {
            world.Draw(8 - step);
            world.Step(8 - step);
            world.Check(8 - step, ToleranceOf(table));
            longest = std::max(longest, world.PartsAsked(8 - step).second);
          }
          CHECK(world.Failed().empty());
        }
      }
    }
  }
  CHECK(longest > 16);
}
SLUICE_TEST_ON_EVERY_PATH("long lists are cut into parts, which are merged in their order",
                          LongEveryShape)

// Returns the answers of all rows in both layers.
std::vector<float> Answers(const World& world) {
  std::vector<float> out;
  for (const auto* of : {&world.o, &world.lse}) {
    for (const Mirrored<float>& layer : *of) out.insert(out.end(), layer.begin(), layer.end());
  }
  return out;
}

void SameBits(Device& device, const KernelTable& table) {
  std::vector<float> want;
  for (const int workers : {1, 2, 3, 7}) {
    Shape shape = LongLists(16, DType::kBFloat16);
    shape.workers = workers;
    World world(device, table, shape, TestSeed());
    world.DrawWhole(6);
    for (int r = 0; r < 6; ++r) world.positions[static_cast<size_t>(r)] = world.LastPosition() - r;
    world.DrawLists(6);
    REQUIRE(world.PartsAsked(6).second > 8);
    for (int run = 0; run < 20; ++run) {
      for (const auto* of : {&world.o, &world.lse}) {
        for (const Mirrored<float>& layer : *of) {
          std::fill(layer.begin(), layer.end(), 0.0f);
          layer.ToDevice(*world.stream);
        }
      }
      world.Step(6);
      const std::vector<float> got = Answers(world);
      if (want.empty()) want = got;
      REQUIRE(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)) == 0);
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH(
    "results are the same to the bit for any number of workers, and each time", SameBits)

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

// Returns the sequences that share their group with `slot`.
std::vector<int> GroupOf(int slot, const Shape& shape, int groups) {
  std::vector<int> out;
  for (int s = slot % groups; s < shape.slots; s += groups) out.push_back(s);
  return out;
}

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

// One sequence, and one group of workers.
Shape OneSequence() {
  Shape shape = LongLists(16, DType::kBFloat16);
  shape.slots = shape.max_rows = 1;
  shape.layers = 1;
  return shape;
}

// Draws a step of the only sequence with lists of many parts, and returns how many parts it has.
int DrawLong(World& world) {
  world.slots[0] = 0;
  world.positions[0] = world.LastPosition();
  do {
    world.DrawLists(1);
  } while (world.PartsAsked(1).first < 20);
  return world.PartsAsked(1).first;
}

void Stealing(Device& device, const KernelTable& table) {
  World world(device, WithFaults(table), OneSequence(), TestSeed());
  const NoFaultAtTheEnd no_fault;
  for (int step = 0; step < 5; ++step) {
    const int parts = DrawLong(world);
    asleep = false;
    calls = 0;
    fault = Fault::kSleepOnce;
    world.Enqueue(*world.stream, 1);
    // The others do all but the part of the worker that sleeps, and the step waits for that part.
    const absl::Time give_up = absl::Now() + absl::Seconds(30);
    while (calls.load() < parts - 1 && absl::Now() < give_up) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(calls.load() == parts - 1);
    fault = Fault::kNone;
    world.Wait();
    CHECK(calls.load() == parts);
    world.Check(1, ToleranceOf(table));
  }
  CHECK(world.Failed().empty());
}
SLUICE_TEST_ON_EVERY_PATH("workers do what is left of the shares of others", Stealing)

// The part that a worker has claimed is nobody else's, whatever becomes of the worker.
void FaultsInAPart(Device& device, const KernelTable& table) {
  Shape shape = LongLists(16, DType::kBFloat16);
  shape.workers = 5;  // the second group has three
  shape.deadline = absl::Seconds(2);
  for (const Fault what : {Fault::kThrow, Fault::kSleep}) {
    World world(device, WithFaults(table), shape, TestSeed());
    const NoFaultAtTheEnd no_fault;
    world.DrawWhole(6);
    for (int r = 0; r < 6; ++r) world.positions[static_cast<size_t>(r)] = 500 + r;
    do {
      world.DrawLists(6);
    } while (!world.Attends(1));
    fault_row = 501;
    fault = what;
    world.Step(6);
    fault = Fault::kNone;
    CHECK(world.Failed() == GroupOf(1, shape, 2));
    world.Check(6, ToleranceOf(table));
    while (asleep.load()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until it has polled
    for (int s = 0; s < shape.slots; ++s) world.co_attention->workers().Join(s);
    for (int step = 0; step < 5; ++step) {
      world.Draw(8);
      world.Step(8);
      world.Check(8, ToleranceOf(table));
    }
    CHECK(world.Failed().empty());
  }
}
SLUICE_TEST_ON_EVERY_PATH(
    "a worker that fails or is late in the midst of a part ends its group's sequences",
    FaultsInAPart)

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

// The failpoint strikes once a worker has claimed its first part.
void DyingInAPart(Device& device, const KernelTable& table) {
  Shape shape = OneSequence();
  shape.workers = 4;
  World world(device, table, shape, TestSeed());
  for (int left = 3; left > 0; --left) {
    DrawLong(world);
    {
      const ScopedFailpoints armed("attention.worker_exit=error*1");
      world.Step(1);
    }
    CHECK(world.Failed() == std::vector<int>{0});
    CHECK(world.co_attention->workers().Statistics().workers == left);
    world.co_attention->workers().Join(0);
    for (int step = 0; step < 3; ++step) {
      DrawLong(world);
      world.Step(1);
      world.Check(1, ToleranceOf(table));
      CHECK(world.Failed().empty());
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH(
    "a worker that dies in the midst of a part ends its sequence, and no later one", DyingInAPart)

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
  const KernelTable& table = *kernels::FindKernelTable("portable");
  const uint64_t first = TestSeed();
  int failed = 0, checked = 0;
  for (uint64_t seed = first; seed < first + 60; ++seed) {
    SimClock clock;
    SimDeviceOptions options;
    options.kernels = &table;
    options.seed = seed;
    if (seed % 4 == 1) options.worker_failures = 0.02;
    if (seed % 4 == 2) options.late_workers = 0.02;
    if (seed % 4 == 3) options.leaving_workers = 0.002;
    const auto device = NewSimDevice(options, &clock);
    Shape shape;
    shape.deadline = absl::Milliseconds(1);
    World world(*device, table, shape, seed);
    for (int step = 0; step < 30; ++step) {
      world.Draw(8);
      world.Step(8);
      world.Check(8, 1e-4);
      const auto lost = world.Failed();
      failed += static_cast<int>(lost.size());
      checked += shape.slots - static_cast<int>(lost.size());
      if (seed % 4 == 0) REQUIRE(lost.empty());
      for (int slot : lost) world.co_attention->workers().Join(slot);
    }
  }
  CHECK(failed > 100);
  CHECK(checked > 60 * 30 * 3);
}

}  // namespace
}  // namespace sluice::co_attention
