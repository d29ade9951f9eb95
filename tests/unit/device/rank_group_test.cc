// These are the promises of src/device/rank_group.h, on every device: the CPU's with ranks as
// threads and as processes, the simulated one, and CUDA's with processes that share a GPU.
#include "src/device/rank_group.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/kernel_table.h"
#include "src/base/dtype.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/device/device.h"
#include "src/device/sim/sim_clock.h"
#include "src/device/sim/sim_device.h"
#include "src/device/sim/sim_ranks.h"
#include "tests/support/device.h"
#include "tests/support/ranks.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

// This is memory of a device, with a copy on the host.
struct Both {
  Buffer device, host;
};

// A Rank is one rank of a case, with its memory.
class Rank {
 public:
  Rank(Device* device, std::unique_ptr<RankGroup> group)
      : device_(device),
        group_(std::move(group)),
        stream_(device->NewStream(Device::StreamKind::kCompute)) {}
  ~Rank() { stream_.reset(); }  // before the group

  RankGroup& group() { return *group_; }
  Stream& stream() { return *stream_; }
  Device& device() { return *device_; }
  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }

  // Returns memory number `number` of the case, zeroed.
  Both& Memory(size_t number, size_t bytes) {
    if (memory_.size() <= number) memory_.resize(number + 1);
    Both& both = memory_[number];
    if (both.host.bytes() == 0) {
      both.device = *device_->Allocate(MemoryKind::kDevice, bytes, "a test");
      both.host = *device_->Allocate(MemoryKind::kPinned, bytes, "a test");
    }
    return both;
  }
  template <typename T>
  T* Host(size_t number) {
    return memory_[number].host.as<T>();
  }
  void* At(size_t number, size_t offset = 0) {
    return memory_[number].device.as<uint8_t>() + offset;
  }
  void Upload(size_t number) {
    const Both& both = memory_[number];
    stream_->Copy(both.device.data(), both.host.data(), both.host.bytes());
  }
  void Download(size_t number) {
    const Both& both = memory_[number];
    stream_->Copy(both.host.data(), both.device.data(), both.host.bytes());
  }
  void KeepProgram(absl::StatusOr<std::unique_ptr<Program>> program) {
    SLUICE_CHECK(program.ok(), program.status().message());
    program_ = *std::move(program);
  }
  Program& program() { return *program_; }
  void Finish() {
    const auto done = device_->NewEvent();
    stream_->Record(*done);
    done->Wait();
  }

 private:
  Device* const device_;
  std::vector<Both> memory_;  // outlives the group, which may have parts of it registered
  const std::unique_ptr<RankGroup> group_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Program> program_;
};

// Returns a value that rank `rank` has at `i`: a multiple of 1/8, so that sums are exact.
float ValueAt(int rank, int64_t i, uint64_t salt = 0) {
  SplitMix64 random(salt * 7919 + static_cast<uint64_t>(rank) * 1'000'003 +
                    static_cast<uint64_t>(i));
  return static_cast<float>(random.Below(64)) / 8.0f - 4.0f;
}

// A case has two parts, since one thread runs all simulated ranks: all enqueue, then all check.
struct Case {
  void (*enqueue)(Rank& rank);
  std::string (*check)(Rank& rank);
};

std::string RunCase(const Case& test, Device& device, const RankGroupOptions& options) {
  auto group = device.JoinRanks(options);
  if (!group.ok()) return std::string(group.status().message());
  Rank rank(&device, *std::move(group));
  test.enqueue(rank);
  rank.Finish();
  if (!device.Health().ok()) return std::string(device.Health().message());
  return test.check(rank);
}

testing::RankBody BodyOn(const std::string& kernels, const Case& test) {
  return [kernels, test](const RankGroupOptions& options) -> std::string {
    auto device = testing::TestDevice(kernels);
    if (!device.ok()) return std::string(device.status().message());
    return RunCase(test, **device, options);
  };
}

void OnThreads(const Case& test) {
  for (const int size : {1, 2, 3, 4}) {
    RankGroupOptions options = testing::RankOptions(size);
    options.round_bytes = 8192;  // so that operations take several rounds
    CHECK(testing::Joined(testing::RunRankThreads(options, BodyOn("portable", test))) == "");
  }
}

void OnProcesses(const Case& test) {
  for (const int size : {2, 4}) {
    const RankGroupOptions options = testing::RankOptions(size);
    CHECK(testing::Joined(testing::RunRankProcesses(options, BodyOn("portable", test))) == "");
  }
}

// These are simulated ranks of one process.
struct SimGroup {
  SimGroup(SimRanksOptions ranks_options, absl::Duration deadline = absl::Seconds(30))
      : ranks(ranks_options, &clock) {
    for (int rank = 0; rank < ranks_options.size; ++rank) {
      SimDeviceOptions options;
      options.kernels = kernels::FindKernelTable("portable");
      options.seed = ranks_options.seed * 100 + static_cast<uint64_t>(rank);
      options.ranks = &ranks;
      devices.push_back(NewSimDevice(options, &clock));
      RankGroupOptions group;
      group.rank = rank;
      group.size = ranks_options.size;
      group.name = "sim";
      group.deadline = deadline;
      each.push_back(
          std::make_unique<Rank>(devices.back().get(), *devices.back()->JoinRanks(group)));
    }
  }
  SimClock clock;
  SimRanks ranks;
  std::vector<std::unique_ptr<SimDevice>> devices;
  std::vector<std::unique_ptr<Rank>> each;
};

void OnSim(const Case& test) {
  const uint64_t seed = TestSeed();
  for (const int size : {1, 2, 3, 4}) {
    for (uint64_t i = 0; i < 20; ++i) {
      SimRanksOptions options;
      options.size = size;
      options.seed = seed + i;
      SimGroup group(options);
      for (auto& rank : group.each) test.enqueue(*rank);
      for (auto& rank : group.each) rank->Finish();
      for (auto& rank : group.each) {
        CHECK(rank->device().Health().ok());
        CHECK(test.check(*rank) == "");
      }
    }
  }
}

// The ranks write into one another's memory where they can, sum in two stages there where they can,
// and then go by NCCL alone.
void OnGpu(const Case& test) {
  if (const std::string why = testing::WhyNoSharedGpu(); !why.empty()) return SkipTest(why);
  const RankGroupOptions by_memory = testing::RankOptions(2);
  RankGroupOptions in_stages = testing::RankOptions(2), by_nccl = testing::RankOptions(2);
  in_stages.two_stage_bytes = 0;
  by_nccl.peer_bytes = 0;
  for (const RankGroupOptions& options : {by_memory, in_stages, by_nccl}) {
    CHECK(testing::Joined(testing::RunRankProcesses(options, BodyOn("cuda", test),
                                                    /*on_gpus=*/true)) == "");
  }
}

#define SLUICE_RANK_TEST(claim, test)                                                       \
  TEST_CASE(claim " (cpu, threads)", "[device][ranks]") { OnThreads(test); }                \
  TEST_CASE(claim " (cpu, processes)", "[device][ranks][processes]") { OnProcesses(test); } \
  TEST_CASE(claim " (sim)", "[device][ranks]") { OnSim(test); }                             \
  TEST_CASE(claim " (cuda)", "[device][ranks][cuda][processes]") { OnGpu(test); }

std::string Wrong(const char* what, int64_t at, double got, double want) {
  return got == want ? "" : absl::StrCat(what, " [", at, "] = ", got, ", not ", want);
}

constexpr int64_t kCount = 5'003;

const Case kSums{
    [](Rank& r) {
      for (const size_t m : {0, 1}) r.Memory(m, kCount * 4);
      for (int64_t i = 0; i < kCount; ++i) r.Host<float>(0)[i] = ValueAt(r.rank(), i);
      r.Upload(0);
      r.group().AllReduce(r.stream(), r.At(0), r.At(1), kCount, DType::kFloat32);
      r.group().AllReduce(r.stream(), r.At(0), r.At(0), kCount, DType::kFloat32);
      r.group().AllReduce(r.stream(), r.At(0), r.At(0), 1, DType::kFloat32);
      r.Memory(2, kCount * 2);
      for (int64_t i = 0; i < kCount; ++i) {
        r.Host<uint16_t>(2)[i] = FloatToBFloat16(ValueAt(r.rank(), i, 1));
      }
      r.Upload(2);
      r.group().AllReduce(r.stream(), r.At(2), r.At(2), kCount, DType::kBFloat16);
      for (const size_t m : {0, 1, 2}) r.Download(m);
    },
    [](Rank& r) -> std::string {
      for (int64_t i = 0; i < kCount; ++i) {
        float want = 0, narrow = 0;
        for (int rank = 0; rank < r.size(); ++rank) {
          want += ValueAt(rank, i);
          narrow += ValueAt(rank, i, 1);
        }
        const float twice = i == 0 ? want * static_cast<float>(r.size()) : want;
        for (const std::string& wrong :
             {Wrong("sum", i, static_cast<double>(r.Host<float>(1)[i]), static_cast<double>(want)),
              Wrong("sum in place", i, static_cast<double>(r.Host<float>(0)[i]),
                    static_cast<double>(twice)),
              Wrong("bf16 sum", i, static_cast<double>(BFloat16ToFloat(r.Host<uint16_t>(2)[i])),
                    static_cast<double>(BFloat16ToFloat(FloatToBFloat16(narrow))))}) {
          if (!wrong.empty()) return wrong;
        }
      }
      const CollectiveCount count = r.group().count(Collective::kAllReduce);
      if (count.calls != 4 || count.bytes != (2 * kCount + 1) * 4 + kCount * 2) {
        return absl::StrCat(count.calls, " calls of ", count.bytes, " bytes were counted");
      }
      return "";
    }};
SLUICE_RANK_TEST("an all-reduce gives every rank the sum", kSums)

const Case kGathers{[](Rank& r) {
                      const auto n = static_cast<size_t>(r.size());
                      r.Memory(0, kCount * 4);
                      r.Memory(1, n * kCount * 4);
                      r.Memory(2, n * kCount * 4);
                      for (int64_t i = 0; i < kCount; ++i) {
                        r.Host<float>(0)[i] = ValueAt(r.rank(), i);
                        r.Host<float>(2)[r.rank() * kCount + i] = ValueAt(r.rank(), i, 2);
                      }
                      r.Upload(0);
                      r.Upload(2);
                      r.group().AllGather(r.stream(), r.At(0), r.At(1), kCount * 4);
                      const size_t own = static_cast<size_t>(r.rank()) * kCount * 4;
                      r.group().AllGather(r.stream(), r.At(2, own), r.At(2), kCount * 4);
                      r.Download(1);
                      r.Download(2);
                    },
                    [](Rank& r) -> std::string {
                      for (int64_t i = 0; i < r.size() * kCount; ++i) {
                        const int from = static_cast<int>(i / kCount);
                        if (r.Host<float>(1)[i] != ValueAt(from, i % kCount))
                          return "a part is wrong";
                        if (r.Host<float>(2)[i] != ValueAt(from, i % kCount, 2))
                          return "a part in place is wrong";
                      }
                      return "";
                    }};
SLUICE_RANK_TEST("an all-gather gives every rank all parts", kGathers)

const Case kScatters{[](Rank& r) {
                       const int64_t all = r.size() * kCount;
                       r.Memory(0, static_cast<size_t>(all) * 4);
                       r.Memory(1, kCount * 4);
                       for (int64_t i = 0; i < all; ++i) r.Host<float>(0)[i] = ValueAt(r.rank(), i);
                       r.Upload(0);
                       r.group().ReduceScatter(r.stream(), r.At(0), r.At(1), kCount,
                                               DType::kFloat32);
                       r.Download(1);
                     },
                     [](Rank& r) -> std::string {
                       for (int64_t i = 0; i < kCount; ++i) {
                         float want = 0;
                         for (int rank = 0; rank < r.size(); ++rank)
                           want += ValueAt(rank, r.rank() * kCount + i);
                         if (r.Host<float>(1)[i] != want)
                           return absl::StrCat("element ", i, " is wrong");
                       }
                       return "";
                     }};
SLUICE_RANK_TEST("a reduce-scatter gives every rank its part of the sum", kScatters)

const Case kBroadcasts{[](Rank& r) {
                         for (int root = 0; root < r.size(); ++root) {
                           const auto m = static_cast<size_t>(root);
                           r.Memory(m, kCount * 4);
                           for (int64_t i = 0; i < kCount; ++i)
                             r.Host<float>(m)[i] = ValueAt(r.rank(), i, m);
                           r.Upload(m);
                         }
                         for (int root = 0; root < r.size(); ++root) {
                           r.group().Broadcast(r.stream(), r.At(static_cast<size_t>(root)),
                                               kCount * 4, root);
                         }
                         for (int root = 0; root < r.size(); ++root)
                           r.Download(static_cast<size_t>(root));
                       },
                       [](Rank& r) -> std::string {
                         for (int64_t i = 0; i < r.size() * kCount; ++i) {
                           const auto root = static_cast<size_t>(i / kCount);
                           const float want = ValueAt(static_cast<int>(root), i % kCount, root);
                           if (r.Host<float>(root)[i % kCount] != want)
                             return absl::StrCat("element ", i, " is wrong");
                         }
                         return "";
                       }};
SLUICE_RANK_TEST("a broadcast gives every rank the root's data", kBroadcasts)

// Every rank hands to the next, even ranks first.
const Case kHandsOn{
    [](Rank& r) {
      constexpr size_t kBytes = 300'000;  // more than a pair's area holds
      r.Memory(0, kBytes);
      r.Memory(1, kBytes);
      std::memset(r.Host<uint8_t>(0), 'a' + r.rank(), kBytes);
      r.Upload(0);
      if (r.size() == 1) return;
      const int next = (r.rank() + 1) % r.size(), last = (r.rank() + r.size() - 1) % r.size();
      const auto send = [&] { r.group().Send(r.stream(), r.At(0), kBytes, next); };
      const auto receive = [&] { r.group().Receive(r.stream(), r.At(1), kBytes, last); };
      if (r.rank() % 2 == 0) send();
      receive();
      if (r.rank() % 2 != 0) send();
      r.Download(1);
    },
    [](Rank& r) -> std::string {
      const int last = (r.rank() + r.size() - 1) % r.size();
      for (size_t i = 0; r.size() > 1 && i < 300'000; ++i) {
        if (r.Host<uint8_t>(1)[i] != 'a' + last) return absl::StrCat("byte ", i, " is wrong");
      }
      return "";
    }};
SLUICE_RANK_TEST("what a rank sends another receives", kHandsOn)

// A unit has 12 bytes; from a to b go (3 a + 5 b) % 7 * 300 of them, none from 0 to 0.
constexpr int32_t kCapacity = 2'000, kUnit = 12;
int32_t UnitsOf(int from, int to) { return (3 * from + 5 * to) % 7 * 300; }
int32_t UnitWord(int from, int to, int64_t i) {
  return from * 1'000'000 + to * 100'000 + static_cast<int32_t>(i);
}
template <bool kRegistered>
void Exchange(Rank& r) {
  const auto n = static_cast<size_t>(r.size());
  const size_t block = kCapacity * kUnit;
  r.Memory(0, n * block);
  r.Memory(1, n * 4);
  r.Memory(2, n * block);
  r.Memory(3, n * 4);
  if (kRegistered) SLUICE_CHECK(r.group().Register(r.At(2), n * block).ok());
  for (int to = 0; to < r.size(); ++to) {
    r.Host<int32_t>(1)[to] = UnitsOf(r.rank(), to);
    for (int64_t i = 0; i < kCapacity * 3; ++i) {
      r.Host<int32_t>(0)[to * kCapacity * 3 + i] = UnitWord(r.rank(), to, i);
    }
  }
  for (const size_t m : {0, 1, 2, 3}) r.Upload(m);
  const AllToAllParams params{r.At(0),   static_cast<const int32_t*>(r.At(1)),
                              r.At(2),   static_cast<int32_t*>(r.At(3)),
                              kCapacity, kUnit};
  r.group().AllToAll(r.stream(), params);
  for (const size_t m : {2, 3}) r.Download(m);
}
std::string WrongOfExchange(Rank& r) {
  for (int from = 0; from < r.size(); ++from) {
    const int32_t units = UnitsOf(from, r.rank());
    if (r.Host<int32_t>(3)[from] != units) return "a count is wrong";
    for (int64_t i = 0; i < int64_t{units} * 3; ++i) {
      if (r.Host<int32_t>(2)[from * kCapacity * 3 + i] != UnitWord(from, r.rank(), i)) {
        return absl::StrCat("word ", i, " from rank ", from, " is wrong");
      }
    }
  }
  return "";
}
const Case kExchanges{Exchange<false>, WrongOfExchange};
SLUICE_RANK_TEST("an all-to-all moves as many units as the device's counts say", kExchanges)
const Case kRegisteredExchanges{Exchange<true>, WrongOfExchange};
SLUICE_RANK_TEST("an all-to-all fills a registered buffer", kRegisteredExchanges)

// A program of two sums runs several times, over other data each time.
constexpr int kRuns = 5;
const Case kRecorded{[](Rank& r) {
                       for (const size_t m : {0, 2}) r.Memory(m, kRuns * kCount * 4);
                       r.Memory(1, kCount * 4);
                       for (int64_t i = 0; i < kRuns * kCount; ++i)
                         r.Host<float>(0)[i] = ValueAt(r.rank(), i);
                       r.Upload(0);
                       r.Finish();
                       r.KeepProgram(r.device().Record(r.stream(), [&r](Stream& s) {
                         r.group().AllReduce(s, r.At(1), r.At(1), kCount, DType::kFloat32);
                         r.group().AllReduce(s, r.At(1), r.At(1), kCount, DType::kFloat32);
                       }));
                       for (size_t run = 0; run < kRuns; ++run) {
                         r.stream().Copy(r.At(1), r.At(0, run * kCount * 4), kCount * 4);
                         r.program().Run(r.stream());
                         r.stream().Copy(r.At(2, run * kCount * 4), r.At(1), kCount * 4);
                       }
                       r.Download(2);
                     },
                     [](Rank& r) -> std::string {
                       for (int64_t i = 0; i < kRuns * kCount; ++i) {
                         float want = 0;
                         for (int rank = 0; rank < r.size(); ++rank) want += ValueAt(rank, i);
                         if (r.Host<float>(2)[i] != want * static_cast<float>(r.size())) {
                           return absl::StrCat("element ", i, " is wrong");
                         }
                       }
                       return "";
                     }};
SLUICE_RANK_TEST("a recorded program has its collectives in every run", kRecorded)

}  // namespace
}  // namespace sluice
