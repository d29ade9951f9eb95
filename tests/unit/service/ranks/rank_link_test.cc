// Ranks that meet by gRPC: how they come together, and what they tell one another.
#include "src/service/ranks/rank_link.h"

#include <sys/mman.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "src/base/rng.h"
#include "src/device/rank_group.h"
#include "tests/support/device.h"
#include "tests/support/ranks.h"
#include "tests/unit/service/ranks/rank_link_support.h"

namespace sluice {
namespace {

using testing::FreeAddress;
using testing::LinkOptions;
using testing::MeetingRanks;
using testing::NotBlamed;
using testing::RunLinks;

// Returns message number `i`; lengths go from nothing to more than rank 0 sends ahead.
std::vector<uint8_t> Message(int i) {
  SplitMix64 random(static_cast<uint64_t>(i));
  const size_t bytes = i == 150 ? (size_t{5} << 20) + 1 : random.Below(i % 10 == 0 ? 300'000 : 500);
  std::vector<uint8_t> message(bytes);
  for (uint8_t& b : message) b = static_cast<uint8_t>(random.Below(256));
  return message;
}

TEST_CASE("every rank receives rank 0's messages in order, by gRPC") {
  for (const int size : {2, 4}) {
    const auto wrong = RunLinks(MeetingRanks(size), [](RankLink& link) -> std::string {
      for (int i = 0; i < 300; ++i) {
        const std::vector<uint8_t> want = Message(i);
        if (link.rank() == 0) {
          if (const auto sent = link.Send(want); !sent.ok()) return sent.ToString();
          continue;
        }
        const auto got = link.Receive();
        if (!got.ok()) return got.status().ToString();
        if (std::vector<uint8_t>(got->begin(), got->end()) != want) {
          return absl::StrCat("message ", i, " is another");
        }
      }
      if (!link.OneHost() || link.Alive() != link.size()) return "not all are here";
      return std::string(link.Meet(absl::Seconds(10)).message());
    });
    CHECK(testing::Joined(wrong) == "");
  }
}

TEST_CASE("rank 0 learns when its messages are carried out, by gRPC") {
  void* const shared =
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(shared != MAP_FAILED);
  auto* const carried = static_cast<std::atomic<int>*>(shared);
  const auto wrong = RunLinks(MeetingRanks(3), [&](RankLink& link) -> std::string {
    for (int i = 1; i <= 20; ++i) {
      if (link.rank() == 0) {
        if (!link.Send(Message(1)).ok()) return "not sent";
        const absl::Status done = link.AwaitDone(link.sent());
        if (!done.ok()) return done.ToString();
        if (*carried != 2 * i) return "the others had not carried it out";
        for (const int other : {1, 2}) {  // it was left before Done
          const auto shown = static_cast<int>(link.Shown(other));
          if (shown != 10 * i + other) return absl::StrCat("rank ", other, " shows ", shown);
        }
        continue;
      }
      if (!link.Receive().ok()) return "not received";
      absl::SleepFor(absl::Milliseconds(link.rank()));
      ++*carried;
      link.Show(static_cast<uint32_t>(10 * i + link.rank()));
      link.Done();
    }
    return "";
  });
  CHECK(testing::Joined(wrong) == "");
  munmap(shared, 4096);
}

TEST_CASE("ranks share what rank 0 has, and part when all are done") {
  const auto wrong = RunLinks(MeetingRanks(3), [](RankLink& link) -> std::string {
    std::vector<uint8_t> id(128, static_cast<uint8_t>(link.rank() == 0 ? 7 : 0));
    const absl::Status shared = link.Share(absl::MakeSpan(id), absl::Seconds(10));
    if (!shared.ok()) return shared.ToString();
    if (id != std::vector<uint8_t>(128, 7)) return "other bytes";
    const absl::Time start = absl::Now();
    absl::SleepFor(absl::Milliseconds(link.rank() == 2 ? 300 : 0));
    link.Part(absl::Seconds(20));
    const absl::Duration took = absl::Now() - start;
    return took < absl::Milliseconds(250) || took > absl::Seconds(15) ? "parted alone" : "";
  });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("rank 0 reads what each rank reported last, by gRPC") {
  const auto report = [](int rank, int i) {
    return std::vector<uint8_t>(static_cast<size_t>(1000 * rank + i), static_cast<uint8_t>(i));
  };
  const auto wrong = RunLinks(MeetingRanks(3), [&](RankLink& link) -> std::string {
    const auto meet = [&] { return link.Meet(absl::Seconds(10)).ok(); };
    if (link.rank() == 0 && link.ReportOf(1).has_value()) return "too early";
    if (!meet()) return "no meeting";
    for (int i = 1; i <= 5; ++i) {
      if (link.rank() != 0) link.Report(report(link.rank(), i));
      if (i == 2) absl::SleepFor(absl::Milliseconds(250));  // some are sent, and some replaced
    }
    for (int rank = 1; link.rank() == 0 && rank < link.size(); ++rank) {
      const absl::Time give_up = absl::Now() + absl::Seconds(5);
      while (link.ReportOf(rank) != report(rank, 5)) {
        if (absl::Now() > give_up) return absl::StrCat("the last of rank ", rank, " never came");
        absl::SleepFor(absl::Milliseconds(5));
      }
    }
    return meet() ? "" : "no meeting";
  });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("a start by gRPC names the ranks that are missing") {
  RankGroupOptions ranks = MeetingRanks(4);
  ranks.join_timeout = absl::Seconds(1);
  const auto wrong = testing::RunRankProcesses(ranks, [](RankGroupOptions own) -> std::string {
    if (own.rank == 1 || own.rank == 3) return "";
    own.join_timeout = absl::Seconds(own.rank == 0 ? 1 : 8);  // rank 2 hears it from rank 0
    const absl::Status status = RankLink::Join(LinkOptions(own)).status();
    if (!absl::StrContains(status.message(), "missing: 1, 3")) return status.ToString();
    return NotBlamed(status, 1);
  });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("a rank without a leader gives up in time, and a leader without a port says so") {
  RankGroupOptions ranks = MeetingRanks(2);
  ranks.join_timeout = absl::Milliseconds(500);
  // This is an address of nobody's, which rank 0 does not listen on.
  const std::string elsewhere = absl::StrReplaceAll(FreeAddress(), {{"127.0.0.1", "192.0.2.1"}});
  const auto wrong = testing::RunRankProcesses(ranks, [&](RankGroupOptions own) -> std::string {
    if (own.rank == 1) return NotBlamed(RankLink::Join(LinkOptions(own)).status(), 0);
    own.name = elsewhere;
    const absl::Status alone = RankLink::Join(LinkOptions(own)).status();
    if (!absl::StrContains(alone.message(), "missing: 1")) return alone.ToString();
    own.name = "127.0.0.1";
    const absl::Status status = RankLink::Join(LinkOptions(own)).status();
    return absl::IsInvalidArgument(status) ? "" : status.ToString();
  });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("rank 0 refuses ranks that do not belong to it") {
  const auto wrong =
      testing::RunRankProcesses(MeetingRanks(3), [](RankGroupOptions own) -> std::string {
        RankLink::Options options = LinkOptions(own);
        if (own.rank == 1) {
          const auto refused = [&](auto change, absl::StatusCode code, const char* said) {
            RankLink::Options other = options;
            change(other);
            const absl::Status status = RankLink::Join(other).status();
            return status.code() == code && absl::StrContains(status.message(), said)
                       ? ""
                       : status.ToString() + "; ";
          };
          const std::string said =
              refused([](auto& o) { o.size = 4; }, absl::StatusCode::kInvalidArgument,
                      "expects 3 ranks, and rank 1 4") +
              refused([](auto& o) { o.rank = 3; }, absl::StatusCode::kInvalidArgument,
                      "and not 3") +
              refused([](auto& o) { o.version = "x"; }, absl::StatusCode::kFailedPrecondition,
                      "from one build");
          if (!said.empty()) return said;
        }
        if (own.rank == 2) absl::SleepFor(absl::Seconds(1));
        const auto link = RankLink::Join(options);
        if (!link.ok()) return link.status().ToString();
        if (own.rank == 1) {
          const absl::Status twice = RankLink::Join(options).status();
          if (!absl::IsAlreadyExists(twice)) return twice.ToString();
        }
        return std::string((*link)->Meet(absl::Seconds(20)).message());
      });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("ranks on the cpu of several hosts are refused") {
  const auto wrong =
      testing::RunRankProcesses(MeetingRanks(2), [](RankGroupOptions own) -> std::string {
        RankLink::Options options = LinkOptions(own);
        options.host = absl::StrCat("host-", own.rank);
        const auto link = RankLink::Join(options);
        if (!link.ok()) return link.status().ToString();
        const auto device = testing::TestDevice("portable");
        own.name = "sluice-test-hosts";
        own.members = link->get();
        const absl::Status status = (*device)->JoinRanks(own).status();
        return absl::IsInvalidArgument(status) &&
                       absl::StrContains(status.message(), "give each a GPU")
                   ? ""
                   : status.ToString();
      });
  CHECK(testing::Joined(wrong) == "");
}

}  // namespace
}  // namespace sluice
