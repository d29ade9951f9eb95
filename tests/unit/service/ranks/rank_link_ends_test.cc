// Links of ranks that end because a rank is killed, is stopped, fails, leaves or does not come.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/device/rank_group.h"
#include "src/service/ranks/rank_link.h"
#include "tests/support/ranks.h"
#include "tests/unit/service/ranks/rank_link_support.h"

namespace sluice {
namespace {

using testing::LinkOptions;
using testing::MeetingRanks;
using testing::NotBlamed;
using testing::RunLinks;

TEST_CASE("a link ends at once on every rank when one is killed") {
  for (const int victim : {0, 1}) {
    const auto wrong = RunLinks(MeetingRanks(3), [victim](RankLink& link) -> std::string {
      if (link.rank() == victim) {
        absl::SleepFor(absl::Milliseconds(100));
        raise(SIGKILL);
      }
      const absl::Time start = absl::Now();
      absl::Status status;
      while (status.ok()) {  // the way is full, since nobody takes anything
        status =
            link.rank() == 0 ? link.Send(std::vector<uint8_t>(100'000)) : link.Receive().status();
      }
      if (absl::Now() - start > absl::Seconds(2)) return "it took too long";
      if (link.failure().ok() || link.Alive() >= link.size()) return "the rest have not failed";
      return NotBlamed(status, victim);
    });
    for (size_t rank = 0; rank < 3; ++rank) {
      CHECK(wrong[rank] == (static_cast<int>(rank) == victim ? "died" : ""));
    }
  }
}

// The process lives and its connections stay open, so that only its silence gives it away. The last
// rank lets it go on in the end.
TEST_CASE("a link ends in seconds when a rank is stopped") {
  for (const int victim : {0, 1}) {
    void* const shared =
        mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(shared != MAP_FAILED);
    auto* const stopped = static_cast<std::atomic<int>*>(shared);
    RankGroupOptions ranks = MeetingRanks(3);
    ranks.still_limit = absl::Seconds(1);
    const auto wrong = RunLinks(ranks, [&](RankLink& link) -> std::string {
      absl::SleepFor(absl::Milliseconds(300));
      const absl::Time start = absl::Now();
      if (link.rank() == victim) {
        stopped->store(getpid());
        raise(SIGSTOP);
      }
      while (link.failure().ok()) {
        absl::SleepFor(absl::Milliseconds(10));
        if (absl::Now() - start > absl::Seconds(20)) return "it did not end";
      }
      const absl::Duration took = absl::Now() - start;
      if (link.rank() == 2) {
        absl::SleepFor(absl::Milliseconds(500));
        kill(stopped->load(), SIGCONT);
      }
      if (link.rank() == victim) return "";  // the others have told it, or are gone
      if (took < absl::Milliseconds(800) || took > absl::Seconds(4)) {
        return absl::StrCat("took ", absl::FormatDuration(took));
      }
      return NotBlamed(link.failure(), victim);
    });
    CHECK(testing::Joined(wrong) == "");
    munmap(shared, 4096);
  }
}

TEST_CASE("a rank that leaves waits for a stopped one until that is known, and not longer") {
  void* const shared =
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(shared != MAP_FAILED);
  auto* const stopped = static_cast<std::atomic<int>*>(shared);
  RankGroupOptions ranks = MeetingRanks(2);
  ranks.still_limit = absl::Milliseconds(500);
  const auto wrong = testing::RunRankProcesses(ranks, [&](const RankGroupOptions& own) {
    auto link = RankLink::Join(LinkOptions(own));
    if (!link.ok()) return "no link: " + link.status().ToString();
    if (own.rank == 0) {
      absl::SleepFor(absl::Milliseconds(200));
      stopped->store(getpid());
      raise(SIGSTOP);
      return std::string();
    }
    while (stopped->load() == 0) absl::SleepFor(absl::Milliseconds(1));
    const absl::Time start = absl::Now();
    link->reset();
    const absl::Duration took = absl::Now() - start;
    kill(stopped->load(), SIGCONT);
    // In good order it would wait for two seconds.
    return took < absl::Milliseconds(1600) ? "" : absl::StrCat("took ", absl::FormatDuration(took));
  });
  CHECK(testing::Joined(wrong) == "");
  munmap(shared, 4096);
}

TEST_CASE("a failure of one rank is that of all, and the first one stays") {
  const auto wrong = RunLinks(MeetingRanks(3), [](RankLink& link) -> std::string {
    if (link.rank() == 1) {
      link.Fail(RankLost(1, "gave up: for a test")).IgnoreError();
      link.Fail(RankLost(2, "is another")).IgnoreError();
    }
    const absl::Status met = link.Meet(absl::Seconds(10));
    absl::SleepFor(absl::Milliseconds(300));  // all have failed before one leaves
    return NotBlamed(met, 1);
  });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("a rank that has left in good order fails only who waits for it") {
  const auto wrong = RunLinks(MeetingRanks(3), [](RankLink& link) -> std::string {
    if (link.rank() == 2) return "";
    absl::SleepFor(absl::Milliseconds(500));
    if (!link.failure().ok()) return link.failure().ToString();
    if (link.rank() == 0 && link.Alive() != 2) return "rank 2 is still there";
    return NotBlamed(link.Meet(absl::Seconds(10)), 2);
  });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("a meeting by gRPC ends by its time, and names who did not come") {
  const auto wrong = RunLinks(MeetingRanks(3), [](RankLink& link) -> std::string {
    if (link.rank() == 2) {
      absl::SleepFor(absl::Milliseconds(600));
      return "";
    }
    return NotBlamed(link.Meet(absl::Milliseconds(200)), 2);
  });
  CHECK(testing::Joined(wrong) == "");
}

}  // namespace
}  // namespace sluice
