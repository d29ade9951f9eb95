// A group of ranks ends by a rank that dies, that does not come, or that calls something else. The
// start of one ends by its time.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/kernel_table.h"
#include "src/base/error.h"
#include "src/device/device.h"
#include "src/device/host_ranks.h"
#include "src/device/rank_group.h"
#include "src/device/sim/sim_clock.h"
#include "src/device/sim/sim_device.h"
#include "src/device/sim/sim_ranks.h"
#include "tests/support/device.h"
#include "tests/support/ranks.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int64_t kCount = 1'000;

// Runs up to `sums` sums, with `before` called ahead of each, and returns what ended them: "" if
// nothing did, else the device's status and how long the last sum took.
struct Ending {
  absl::Status status;
  absl::Duration took;
};
absl::StatusOr<Ending> SumsOn(const std::string& kernels, const RankGroupOptions& options, int sums,
                              const std::function<void(int)>& before, int64_t count = kCount) {
  auto device = testing::TestDevice(kernels);
  if (!device.ok()) return device.status();
  auto group = (*device)->JoinRanks(options);
  if (!group.ok()) return group.status();
  const auto memory = (*device)->Allocate(MemoryKind::kDevice, size_t(count) * 4, "a test");
  const auto stream = (*device)->NewStream(Device::StreamKind::kCompute);
  const auto done = (*device)->NewEvent();
  Ending ending;
  for (int i = 0; i < sums && ending.status.ok(); ++i) {
    before(i);
    const absl::Time start = absl::Now();
    (*group)->AllReduce(*stream, memory->data(), memory->data(), count, DType::kFloat32);
    stream->Record(*done);
    done->Wait();
    ending.took = absl::Now() - start;
    ending.status = (*device)->Health();
  }
  if (!ending.status.ok()) {  // later operations do nothing
    (*group)->AllReduce(*stream, memory->data(), memory->data(), count, DType::kFloat32);
    stream->Record(*done);
    done->Wait();
    if ((*group)->status().ok()) return absl::InternalError("the group did not fail");
  }
  return ending;
}

// Returns what is wrong with an ending that rank `rank` is to blame for.
std::string Blamed(const absl::StatusOr<Ending>& ending, int rank, absl::Duration least,
                   absl::Duration most) {
  if (!ending.ok()) return absl::StrCat("no sums: ", ending.status().message());
  const absl::Status& status = ending->status;
  if (!absl::IsUnavailable(status) || ReasonOf(status) != "RANK_LOST") {
    return absl::StrCat("ended with ", status.ToString());
  }
  if (status.message().find(absl::StrCat("rank ", rank, " ")) == std::string::npos) {
    return absl::StrCat("does not name rank ", rank, ": ", status.message());
  }
  if (ending->took < least || ending->took > most) {
    return absl::StrCat("took ", absl::FormatDuration(ending->took));
  }
  return "";
}

// Rank 1 of three kills itself before its third sum.
std::vector<std::string> RunWithDeath(const std::string& kernels, int size, bool on_gpus,
                                      bool by_memory = true) {
  RankGroupOptions all = testing::RankOptions(size);
  if (!by_memory) all.peer_bytes = 0;
  return testing::RunRankProcesses(
      all,
      [&](const RankGroupOptions& options) {
        return Blamed(SumsOn(kernels, options, 10,
                             [&](int i) {
                               if (options.rank == 1 && i == 2) raise(SIGKILL);
                             }),
                      1, absl::ZeroDuration(), absl::Seconds(5));
      },
      on_gpus);
}

TEST_CASE("a rank that is killed ends the others at once (cpu)", "[device][ranks][processes]") {
  const auto wrong = RunWithDeath("portable", 3, false);
  CHECK(wrong[0] == "");
  CHECK(wrong[1] == "died");
  CHECK(wrong[2] == "");
}
TEST_CASE("a rank that is killed ends the others at once (cuda)",
          "[device][ranks][cuda][processes]") {
  if (const std::string why = testing::WhyNoSharedGpu(); !why.empty()) return SkipTest(why);
  for (const bool by_memory : {true, false}) {
    const auto wrong = RunWithDeath("cuda", 2, true, by_memory);
    CHECK(wrong[0] == "");
    CHECK(wrong[1] == "died");
  }
}

// A stopped process keeps its locks, so that only its silence gives it away. The third rank lets it
// go on in the end.
TEST_CASE("a rank that is stopped ends the others in seconds", "[device][ranks][processes]") {
  void* const shared =
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(shared != MAP_FAILED);
  auto* const stopped = static_cast<std::atomic<int>*>(shared);
  RankGroupOptions all = testing::RankOptions(3);
  all.still_limit = absl::Seconds(1);
  const auto wrong = testing::RunRankProcesses(all, [&](const RankGroupOptions& options) {
    const auto ending = SumsOn("portable", options, 10, [&](int i) {
      if (i != 2) return;
      absl::SleepFor(absl::Milliseconds(300));  // The ranks have seen one another run.
      if (options.rank == 1) {
        stopped->store(getpid());
        raise(SIGSTOP);
      }
    });
    if (options.rank == 2) kill(stopped->load(), SIGCONT);
    const bool late = options.rank == 1;
    return Blamed(ending, 1, late ? absl::ZeroDuration() : absl::Milliseconds(800),
                  absl::Seconds(5));
  });
  CHECK(testing::Joined(wrong) == "");
  munmap(shared, 4096);
}

TEST_CASE("a rank that does not come ends the others by the deadline", "[device][ranks]") {
  RankGroupOptions options = testing::RankOptions(3);
  options.deadline = absl::Milliseconds(300);
  const auto wrong = testing::RunRankThreads(options, [](const RankGroupOptions& own) {
    const bool late = own.rank == 2;
    return Blamed(SumsOn("portable", own, 10,
                         [&](int i) {
                           if (late && i == 3) absl::SleepFor(absl::Seconds(1));
                         }),
                  2, late ? absl::ZeroDuration() : absl::Milliseconds(250), absl::Seconds(1));
  });
  CHECK(testing::Joined(wrong) == "");
}

// A GPU does not know which rank is late, so a rank says that it has waited.
TEST_CASE("a rank that does not come ends the others by the deadline (cuda)",
          "[device][ranks][cuda][processes]") {
  if (const std::string why = testing::WhyNoSharedGpu(); !why.empty()) return SkipTest(why);
  for (const bool by_memory : {true, false}) {
    RankGroupOptions all = testing::RankOptions(2);
    all.deadline = absl::Seconds(2);
    if (!by_memory) all.peer_bytes = 0;
    const auto wrong = testing::RunRankProcesses(
        all,
        [](const RankGroupOptions& own) {
          const bool late = own.rank == 1;
          return Blamed(SumsOn("cuda", own, 10,
                               [&](int i) {
                                 if (late && i == 3) absl::SleepFor(absl::Seconds(4));
                               }),
                        0, late ? absl::ZeroDuration() : absl::Seconds(1.9), absl::Seconds(3));
        },
        /*on_gpus=*/true);
    CHECK(testing::Joined(wrong) == "");
  }
}

TEST_CASE("ranks that call other operations fail, and say which", "[device][ranks]") {
  const auto wrong =
      testing::RunRankThreads(testing::RankOptions(2), [](const RankGroupOptions& own) {
        const auto ending = SumsOn(
            "portable", own, 1, [](int) {}, own.rank == 0 ? kCount : kCount + 1);
        if (!ending.ok()) return std::string(ending.status().message());
        const std::string text = ending->status.ToString();
        return text.find("all-reduce of 1001") != std::string::npos ? "" : "ended with " + text;
      });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("simulated ranks end by the deadline when one is lost", "[device][ranks]") {
  const uint64_t seed = TestSeed();
  for (uint64_t i = 0; i < 20; ++i) {
    SimClock clock;
    SimRanksOptions options;
    options.size = 3;
    options.seed = seed + i;
    options.lost_rank = static_cast<int>(i % 3);
    options.lost_at = 4;
    SimRanks ranks(options, &clock);
    std::vector<std::unique_ptr<SimDevice>> devices;
    std::vector<std::unique_ptr<RankGroup>> groups;
    std::vector<std::unique_ptr<Stream>> streams;
    std::vector<Buffer> memory;
    RankGroupOptions own = testing::RankOptions(3);
    own.deadline = absl::Seconds(2);
    for (own.rank = 0; own.rank < 3; ++own.rank) {
      SimDeviceOptions device;
      device.kernels = kernels::FindKernelTable("portable");
      device.seed = options.seed + static_cast<uint64_t>(own.rank);
      device.ranks = &ranks;
      devices.push_back(NewSimDevice(device, &clock));
      groups.push_back(*devices.back()->JoinRanks(own));
      streams.push_back(devices.back()->NewStream(Device::StreamKind::kCompute));
      memory.push_back(*devices.back()->Allocate(MemoryKind::kDevice, kCount * 4, "a test"));
    }
    const absl::Time start = clock.Now();
    for (int sum = 0; sum < 10; ++sum) {
      for (size_t rank = 0; rank < 3; ++rank) {
        void* const data = memory[rank].data();
        groups[rank]->AllReduce(*streams[rank], data, data, kCount, DType::kFloat32);
      }
    }
    streams.clear();  // run out, in virtual time
    CHECK(clock.Now() - start >= absl::Seconds(2));
    CHECK(clock.Now() - start < absl::Seconds(2.1));
    for (const auto& device : devices) {
      const absl::Status health = device->Health();
      CHECK(absl::IsUnavailable(health));
      CHECK(health.message().find(absl::StrCat("rank ", options.lost_rank, " ")) == 0);
      CHECK(health.message().find("all-reduce number 4") != std::string::npos);
    }
  }
}

TEST_CASE("a start ends by its deadline, and names the ranks that are missing", "[device][ranks]") {
  RankGroupOptions options = testing::RankOptions(4);
  options.join_timeout = absl::Milliseconds(200);
  const auto wrong = testing::RunRankThreads(options, [](const RankGroupOptions& own) {
    if (own.rank == 1 || own.rank == 3) return std::string();
    const absl::Status status = SumsOn("portable", own, 1, [](int) {}).status();
    if (!absl::IsUnavailable(status)) return status.ToString();
    return status.message().find("missing: 1, 3") != std::string::npos ? "" : status.ToString();
  });
  CHECK(testing::Joined(wrong) == "");
  options.rank = 1;  // and without a leader
  const absl::Status status = SumsOn("portable", options, 1, [](int) {}).status();
  CHECK(absl::IsUnavailable(status));
  CHECK(status.message().find("rank 0 ") == 0);
}

TEST_CASE("a group takes no second rank of a number, nor one of other sizes", "[device][ranks]") {
  RankGroupOptions options = testing::RankOptions(2);
  options.join_timeout = absl::Seconds(5);
  std::thread leader([options] {
    RankGroupOptions own = options;
    SumsOn("portable", own, 1, [](int) {}).IgnoreError();
  });
  RankGroupOptions other = options;
  other.rank = 1;
  other.size = 3;
  const absl::Status sizes = SumsOn("portable", other, 1, [](int) {}).status();
  CHECK(absl::IsInvalidArgument(sizes));
  other.size = 2;
  other.rank = 0;
  const absl::Status twice = SumsOn("portable", other, 1, [](int) {}).status();
  CHECK(absl::IsAlreadyExists(twice));
  other.rank = 1;
  CHECK(SumsOn("portable", other, 1, [](int) {}).ok());
  leader.join();
}

TEST_CASE("what a killed leader left is replaced", "[device][ranks]") {
  RankGroupOptions options = testing::RankOptions(2);
  const int left = shm_open(("/" + options.name).c_str(), O_CREAT | O_RDWR, 0600);
  REQUIRE(left >= 0);
  REQUIRE(ftruncate(left, 1 << 20) == 0);
  close(left);
  const auto wrong = testing::RunRankThreads(options, [](const RankGroupOptions& own) {
    const auto ending = SumsOn("portable", own, 3, [](int) {});
    return ending.ok() ? ending->status.ToString() : ending.status().ToString();
  });
  CHECK(wrong == std::vector<std::string>{"OK", "OK"});
  // Nothing is left behind.
  CHECK(shm_open(("/" + options.name).c_str(), O_RDWR, 0600) < 0);
}

TEST_CASE("options of a group that are out of range are named", "[device][ranks]") {
  const auto device = testing::TestDevice("portable");
  REQUIRE(device.ok());
  const auto refused = [&](void (*change)(RankGroupOptions&), const char* names) {
    RankGroupOptions options = testing::RankOptions(2);
    change(options);
    const absl::Status status = (*device)->JoinRanks(options).status();
    CHECK(absl::IsInvalidArgument(status));
    CHECK(status.message().find(names) != std::string::npos);
  };
  refused([](RankGroupOptions& o) { o.size = 65; }, "65 ranks");
  refused([](RankGroupOptions& o) { o.rank = 2; }, "rank 2");
  refused([](RankGroupOptions& o) { o.name = "a/b"; }, "a/b");
  refused([](RankGroupOptions& o) { o.deadline = absl::ZeroDuration(); }, "deadline");
  refused([](RankGroupOptions& o) { o.round_bytes = 100; }, "round_bytes");
  refused([](RankGroupOptions& o) { o.peer_bytes = size_t{65} << 20; }, "peer_bytes");
}

}  // namespace
}  // namespace sluice
