// These tests hold a channel to its order and to its ends.
#include "src/device/rank_channel.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/base/rng.h"
#include "src/device/shared_arenas.h"
#include "tests/support/ranks.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

absl::StatusOr<std::unique_ptr<RankChannel>> Join(const RankGroupOptions& options) {
  return JoinHostChannel(
      {options.name, options.rank, options.size, options.join_timeout, absl::Seconds(5)});
}

// Returns message number `i`; lengths go from nothing to more than the ring holds.
std::vector<uint8_t> Message(int i) {
  SplitMix64 random(static_cast<uint64_t>(i));
  const size_t bytes = i == 150 ? (size_t{3} << 20) + 1 : random.Below(i % 10 == 0 ? 300'000 : 500);
  std::vector<uint8_t> message(bytes);
  for (uint8_t& b : message) b = static_cast<uint8_t>(random.Below(256));
  return message;
}

std::string Carry(const RankGroupOptions& options) {
  const auto channel = Join(options);
  if (!channel.ok()) return std::string(channel.status().message());
  for (int i = 0; i < 300; ++i) {
    const std::vector<uint8_t> want = Message(i);
    if (options.rank == 0) {
      if (const auto sent = (*channel)->Send(want); !sent.ok()) return sent.ToString();
      continue;
    }
    const auto got = (*channel)->Receive();
    if (!got.ok()) return got.status().ToString();
    if (std::vector<uint8_t>(got->begin(), got->end()) != want) {
      return absl::StrCat("message ", i, " is another");
    }
  }
  return std::string((*channel)->Meet(absl::Seconds(10)).message());
}

TEST_CASE("every rank receives rank 0's messages in order", "[device][ranks]") {
  for (const int size : {1, 2, 3}) {
    const RankGroupOptions options = testing::RankOptions(size);
    CHECK(testing::Joined(testing::RunRankThreads(options, Carry)) == "");
  }
}
TEST_CASE("every rank receives rank 0's messages in order (processes)", "[device][processes]") {
  const RankGroupOptions options = testing::RankOptions(3);
  CHECK(testing::Joined(testing::RunRankProcesses(options, Carry)) == "");
}

// Returns what is wrong with an end that names rank `rank`.
std::string NotBlamed(const absl::Status& status, int rank) {
  const bool named = status.message().find(absl::StrCat("rank ", rank, " ")) != std::string::npos;
  return absl::IsUnavailable(status) && ReasonOf(status) == "RANK_LOST" && named
             ? ""
             : "ended with " + status.ToString();
}

TEST_CASE("a channel ends when a rank is killed", "[device][processes]") {
  for (const int victim : {0, 1}) {
    const auto wrong = testing::RunRankProcesses(
        testing::RankOptions(3), [victim](const RankGroupOptions& options) -> std::string {
          const auto channel = Join(options);
          if (!channel.ok()) return std::string(channel.status().message());
          if (options.rank == victim) {
            absl::SleepFor(absl::Milliseconds(100));
            raise(SIGKILL);
          }
          const absl::Time start = absl::Now();
          absl::Status status;
          while (status.ok()) {  // the ring fills, since the victim takes nothing
            status = options.rank == 0 ? (*channel)->Send(std::vector<uint8_t>(100'000))
                                       : (*channel)->Receive().status();
          }
          if (absl::Now() - start > absl::Seconds(2)) return "it took too long";
          return NotBlamed(status, victim);
        });
    for (size_t rank = 0; rank < 3; ++rank) {
      CHECK(wrong[rank] == (static_cast<int>(rank) == victim ? "died" : ""));
    }
  }
}

TEST_CASE("rank 0 learns when its messages are carried out", "[device][ranks]") {
  std::atomic<int> carried = 0;
  const auto wrong = testing::RunRankThreads(
      testing::RankOptions(3), [&](const RankGroupOptions& options) -> std::string {
        const auto channel = Join(options);
        if (!channel.ok()) return std::string(channel.status().message());
        for (int i = 1; i <= 20; ++i) {
          if (options.rank == 0) {
            if (!(*channel)->Send(Message(1)).ok()) return "not sent";
            const absl::Status done = (*channel)->AwaitDone((*channel)->sent());
            if (!done.ok()) return done.ToString();
            if (carried != 2 * i) return "the others had not carried it out";
            for (const int other : {1, 2}) {  // it was left before Done
              const auto shown = static_cast<int>((*channel)->Shown(other));
              if (shown != 10 * i + other) return absl::StrCat("rank ", other, " shows ", shown);
            }
            continue;
          }
          if (!(*channel)->Receive().ok()) return "not received";
          absl::SleepFor(absl::Milliseconds(options.rank));
          ++carried;
          (*channel)->Show(static_cast<uint32_t>(10 * i + options.rank));
          (*channel)->Done();
        }
        return "";
      });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("rank 0 reads what each rank reported last, also of one that was killed",
          "[device][processes]") {
  const auto report = [](int rank, int i) {
    return std::vector<uint8_t>(static_cast<size_t>(1000 * rank + i), static_cast<uint8_t>(i));
  };
  const auto wrong = testing::RunRankProcesses(
      testing::RankOptions(3), [&](const RankGroupOptions& options) -> std::string {
        const auto channel = Join(options);
        if (!channel.ok()) return std::string(channel.status().message());
        if (options.rank == 0 && (*channel)->ReportOf(1).has_value()) return "too early";
        if (!(*channel)->Meet(absl::Seconds(10)).ok()) return "no meeting";
        for (int i = 1; options.rank != 0 && i <= 5; ++i) {
          (*channel)->Report(report(options.rank, i));
        }
        if (!(*channel)->Meet(absl::Seconds(10)).ok()) return "no meeting";
        if (options.rank == 2) raise(SIGKILL);
        for (int rank = 1; options.rank == 0 && rank < options.size; ++rank) {
          if ((*channel)->ReportOf(rank) != report(rank, 5)) return "not the last one";
        }
        return "";
      });
  CHECK(wrong == std::vector<std::string>{"", "", "died"});
}

TEST_CASE("rank 0 writes into the arena of each rank", "[device][processes]") {
  constexpr size_t kBytes = size_t{3} << 20;
  const auto wrong = testing::RunRankProcesses(
      testing::RankOptions(3), [](const RankGroupOptions& options) -> std::string {
        const auto channel = Join(options);
        if (!channel.ok()) return std::string(channel.status().message());
        const auto arenas =
            SharedArenas::Make(**channel, options.name + "-memory", kBytes, absl::Seconds(10));
        if (!arenas.ok()) return arenas.status().ToString();
        for (int rank = 0; options.rank == 0 && rank < options.size; ++rank) {
          (*arenas)->Of(rank)[kBytes - 1] = static_cast<uint8_t>(10 + rank);
        }
        if (!(*channel)->Meet(absl::Seconds(10)).ok()) return "no meeting";
        const uint8_t* own = (*arenas)->own();
        return own[0] == 0 && own[kBytes - 1] == 10 + options.rank ? "" : "another's bytes";
      });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("an arena that /dev/shm has no room for is refused on every rank", "[device][ranks]") {
  const auto wrong = testing::RunRankThreads(
      testing::RankOptions(2), [](const RankGroupOptions& options) -> std::string {
        const auto channel = Join(options);
        if (!channel.ok()) return std::string(channel.status().message());
        // Rank 1 asks for more than any machine has; rank 0 waits for it in vain.
        const size_t bytes = options.rank == 1 ? size_t{1} << 50 : size_t{1} << 20;
        const auto arenas =
            SharedArenas::Make(**channel, options.name + "-memory", bytes, absl::Milliseconds(300));
        if (options.rank == 0) return NotBlamed(arenas.status(), 1);
        return arenas.status().message().find("/dev/shm") != std::string::npos
                   ? ""
                   : arenas.status().ToString();
      });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("a meeting ends by its time, and names who did not come", "[device][ranks]") {
  const auto wrong = testing::RunRankThreads(
      testing::RankOptions(3), [](const RankGroupOptions& options) -> std::string {
        const auto channel = Join(options);
        if (!channel.ok()) return std::string(channel.status().message());
        if (options.rank == 2) {
          absl::SleepFor(absl::Milliseconds(400));
          return "";
        }
        return NotBlamed((*channel)->Meet(absl::Milliseconds(200)), 2);
      });
  CHECK(testing::Joined(wrong) == "");
}

}  // namespace
}  // namespace sluice
