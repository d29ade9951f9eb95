// What the tests of co-attention share beside the world: faults that workers meet in place of the
// kernel, and tests on every path.
#pragma once

#include <atomic>
#include <catch2/catch.hpp>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels/kernel_table.h"
#include "src/device/sim/sim_device.h"
#include "tests/support/device.h"
#include "tests/test_main.h"
#include "tests/unit/attention/co_attention_world.h"
#include "tests/unit/attention/worker_paths.h"

namespace sluice::co_attention {

using kernels::KernelTable;
using kernels::SparseAttentionParams;

// A fault that the workers of a test have in place of the kernel, for the row at position `row`.
// kSleepOnce is met by one call of the kernel alone, whatever its row is.
enum class Fault { kNone, kThrow, kSleep, kSleepOnce };
inline std::atomic<Fault> fault{Fault::kNone};
inline std::atomic<int> calls{0};  // of the kernel that are done, since WithFaults
inline std::atomic<int> fault_row{-1};
inline std::atomic<bool> asleep{false};
// whether what it read became another sequence's before it was done
inline std::atomic<bool> foreign{false};
inline void (*kernel)(const SparseAttentionParams&, kernels::Worker) = nullptr;

inline std::vector<float> ResultOf(const SparseAttentionParams& p) {
  const int64_t group = p.heads / p.cache.kv_heads * int64_t{p.cache.head_dim};
  return {p.o + p.kv_head_begin * group, p.o + p.kv_head_end * group};
}

inline void SleepOnce(const SparseAttentionParams& p, kernels::Worker worker) {
  kernel(p, worker);
  if (!asleep.exchange(true)) {
    while (fault.load() == Fault::kSleepOnce) std::this_thread::yield();
  }
  ++calls;
}

inline void Faulty(const SparseAttentionParams& p, kernels::Worker worker) {
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

inline KernelTable WithFaults(const KernelTable& table) {
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
inline double ToleranceOf(const KernelTable& table) {
  return std::string(table.name) == "amx" || std::string(table.name) == "avx512bf16" ? 3e-2 : 1e-4;
}

// Returns the sequences that share their group with `slot`.
inline std::vector<int> GroupOf(int slot, const Shape& shape, int groups) {
  std::vector<int> out;
  for (int s = slot % groups; s < shape.slots; s += groups) out.push_back(s);
  return out;
}

// Records steps of several sizes, and runs them in turn. The host gets ahead of the stream at last.
inline void ReplaySteps(World& world, Device& device, double tolerance) {
  std::vector<std::unique_ptr<Program>> programs;
  const int buckets[] = {2, 5, 8};
  for (const int rows : buckets) {
    programs.push_back(
        *device.Record(*world.stream, [&world, rows](Stream& s) { world.Enqueue(s, rows); }));
  }
  for (int step = 0; step < 60; ++step) {
    const auto bucket = static_cast<size_t>(step) % std::size(buckets);
    world.Draw(buckets[bucket]);
    programs[bucket]->Run(*world.stream);
    world.Wait();
    world.Check(buckets[bucket], tolerance);
  }
  for (int step = 0; step < 30; ++step) programs[2]->Run(*world.stream);
  world.Wait();
  CHECK(world.Failed().empty());
}

// Sequences that failed, and those that were checked.
struct FaultCounts {
  int failed = 0, checked = 0;
};

// Runs `steps` steps for each of `seeds` seeds on the simulated device, whose workers fail, are
// late or leave in three seeds of four. Lost sequences come back.
inline FaultCounts SimulateFaults(Shape shape, int seeds, int steps) {
  const KernelTable& table = *kernels::FindKernelTable("portable");
  shape.deadline = absl::Milliseconds(1);
  FaultCounts counts;
  for (uint64_t seed = TestSeed(), end = seed + static_cast<uint64_t>(seeds); seed < end; ++seed) {
    SimClock clock;
    SimDeviceOptions options;
    options.kernels = &table;
    options.seed = seed;
    if (seed % 4 == 1) options.worker_failures = 0.02;
    if (seed % 4 == 2) options.late_workers = 0.02;
    if (seed % 4 == 3) options.leaving_workers = 0.002;
    const auto device = NewSimDevice(options, &clock);
    World world(*device, table, shape, seed);
    for (int step = 0; step < steps; ++step) {
      world.Draw(8);
      world.Step(8);
      world.Check(8, 1e-4);
      const auto lost = world.Failed();
      counts.failed += static_cast<int>(lost.size());
      counts.checked += shape.slots - static_cast<int>(lost.size());
      if (seed % 4 == 0) REQUIRE(lost.empty());
      for (int slot : lost) world.co_attention->workers().Join(slot);
    }
  }
  return counts;
}

}  // namespace sluice::co_attention
