// Co-attention with long lists, which are cut into parts.
#include <catch2/catch.hpp>

#include "src/attention/offload/worker_share.h"
#include "src/base/failpoint.h"
#include "src/base/rng.h"
#include "tests/test_main.h"
#include "tests/unit/attention/co_attention_faults.h"
#include "tests/unit/attention/co_attention_world.h"

namespace sluice::co_attention {
namespace {

using kernels::DType;

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

TEST_CASE("the workers of a group begin with shares of parts that are even, each part once") {
  SplitMix64 random(TestSeed());
  CoAttention::Options options;
  options.slots = options.max_rows = 4;
  options.heads = options.kv_heads = 2;
  options.head_dim = 16;
  options.unit_tokens = 16;
  options.capacity = 300;
  int32_t rows = options.max_rows;
  for (int i = 0; i < 300; ++i) {
    options.workers = 1 + i % 9;
    std::vector<int32_t> slots = {0, 1, 2, 3}, positions(4, 4799), counts;
    // The last list has more than all others.
    while (counts.size() < 7) counts.push_back(static_cast<int32_t>(random.Below(30)));
    counts.push_back(300);
    CoAttentionSide request;
    request.rows = &rows;
    request.slots = slots.data();
    request.positions = positions.data();
    request.lists.counts = counts.data();
    request.lists.capacity = options.capacity;
    std::vector<PartWords> words(counts.size());
    const PartBoard board(words.data(), counts.data(), 4);
    const uint64_t all = (uint64_t{1} << options.workers) - 1;
    std::vector<int64_t> of_worker;
    std::vector<std::vector<int>> begun;
    for (size_t l = 0; l < counts.size(); ++l) {
      begun.emplace_back(static_cast<size_t>(board.Parts(static_cast<int64_t>(l))));
    }
    int64_t total = 0, largest_part = 0;
    for (int worker = 0; worker < options.workers; ++worker) {
      WorkerShare share(options);
      share.TakeRows(request, [all](int) { return all; });
      share.Divide(board, request, 0, uint64_t{1} << worker);
      of_worker.push_back(0);
      for (size_t l = 0; l < counts.size(); ++l) {
        for (int part = 0; part < static_cast<int>(begun[l].size()); ++part) {
          if (!share.Begins(l, part)) continue;
          ++begun[l][static_cast<size_t>(part)];
          const PartBoard::Units units = board.UnitsOf(static_cast<int64_t>(l), part);
          const int64_t tokens = 16 + 16 * (units.end - units.begin);
          of_worker.back() += tokens;
          largest_part = std::max(largest_part, tokens);
        }
      }
      total += of_worker.back();
    }
    for (const auto& list : begun) REQUIRE(list == std::vector<int>(list.size(), 1));
    for (const int64_t tokens : of_worker) {
      REQUIRE(std::abs(tokens - total / options.workers) <= largest_part + 1);
    }
  }
}

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
  shape.workers = 4;  // each group has two
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

// The failpoint strikes once a worker has claimed its first part.
void DyingInAPart(Device& device, const KernelTable& table) {
  Shape shape = OneSequence();
  shape.workers = 4;
  World world(device, WithFaults(table), shape, TestSeed());
  for (int left = 3; left > 0; --left) {
    const int parts = DrawLong(world);
    calls = 0;
    {
      const ScopedFailpoints armed("attention.worker_exit=error*1");
      world.Step(1);
    }
    CHECK(calls.load() == parts - 1);
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

#endif

}  // namespace
}  // namespace sluice::co_attention
