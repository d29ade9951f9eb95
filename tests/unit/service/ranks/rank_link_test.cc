// Ranks that meet by gRPC: what they tell one another, how they end, and how bytes of caches reach
// them. Every rank is a process of its own, since a process that has used gRPC cannot fork.
#include "src/service/ranks/rank_link.h"

#include <arpa/inet.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "src/base/rng.h"
#include "src/device/rank_group.h"
#include "src/kv/far_heads.h"
#include "src/kv/page_pool.h"
#include "src/service/ranks/far_memory.h"
#include "src/service/ranks/range_landing.h"
#include "tests/support/device.h"
#include "tests/support/ranks.h"
#include "tests/test_main.h"
#include "tests/unit/kv/transfer_support.h"

namespace sluice {
namespace {

using Body = std::function<std::string(RankLink& link)>;

// Returns an address at which nobody listens.
std::string FreeAddress() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(at);
  REQUIRE(bind(fd, reinterpret_cast<sockaddr*>(&at), bytes) == 0);
  REQUIRE(getsockname(fd, reinterpret_cast<sockaddr*>(&at), &bytes) == 0);
  close(fd);
  return absl::StrCat("127.0.0.1:", ntohs(at.sin_port));
}

RankLink::Options LinkOptions(const RankGroupOptions& rank) {
  RankLink::Options options;
  options.leader = rank.name;
  options.rank = rank.rank;
  options.size = rank.size;
  options.version = "test";
  options.join_timeout = rank.join_timeout;
  options.deadline = absl::Seconds(5);
  options.still_limit = rank.still_limit;
  return options;
}

RankGroupOptions Ranks(int size) {
  RankGroupOptions options = testing::RankOptions(size);
  options.name = FreeAddress();
  return options;
}

std::vector<std::string> RunLinks(const RankGroupOptions& ranks, const Body& body) {
  return testing::RunRankProcesses(ranks, [&](const RankGroupOptions& own) {
    const auto link = RankLink::Join(LinkOptions(own));
    return link.ok() ? body(**link) : "no link: " + link.status().ToString();
  });
}

// Returns what is wrong with an end that names rank `rank`.
std::string NotBlamed(const absl::Status& status, int rank) {
  const bool named = absl::StrContains(status.message(), absl::StrCat("rank ", rank, " "));
  return absl::IsUnavailable(status) && ReasonOf(status) == "RANK_LOST" && named
             ? ""
             : "ended with " + status.ToString();
}

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
    const auto wrong = RunLinks(Ranks(size), [](RankLink& link) -> std::string {
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
  const auto wrong = RunLinks(Ranks(3), [&](RankLink& link) -> std::string {
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
  const auto wrong = RunLinks(Ranks(3), [](RankLink& link) -> std::string {
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
  const auto wrong = RunLinks(Ranks(3), [&](RankLink& link) -> std::string {
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

TEST_CASE("a link ends at once on every rank when one is killed") {
  for (const int victim : {0, 1}) {
    const auto wrong = RunLinks(Ranks(3), [victim](RankLink& link) -> std::string {
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
    RankGroupOptions ranks = Ranks(3);
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
  RankGroupOptions ranks = Ranks(2);
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
  const auto wrong = RunLinks(Ranks(3), [](RankLink& link) -> std::string {
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
  const auto wrong = RunLinks(Ranks(3), [](RankLink& link) -> std::string {
    if (link.rank() == 2) return "";
    absl::SleepFor(absl::Milliseconds(500));
    if (!link.failure().ok()) return link.failure().ToString();
    if (link.rank() == 0 && link.Alive() != 2) return "rank 2 is still there";
    return NotBlamed(link.Meet(absl::Seconds(10)), 2);
  });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("a meeting by gRPC ends by its time, and names who did not come") {
  const auto wrong = RunLinks(Ranks(3), [](RankLink& link) -> std::string {
    if (link.rank() == 2) {
      absl::SleepFor(absl::Milliseconds(600));
      return "";
    }
    return NotBlamed(link.Meet(absl::Milliseconds(200)), 2);
  });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("a start by gRPC names the ranks that are missing") {
  RankGroupOptions ranks = Ranks(4);
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
  RankGroupOptions ranks = Ranks(2);
  ranks.join_timeout = absl::Milliseconds(500);
  const auto wrong = testing::RunRankProcesses(ranks, [](RankGroupOptions own) -> std::string {
    if (own.rank == 1) return NotBlamed(RankLink::Join(LinkOptions(own)).status(), 0);
    own.name = "192.0.2.1:7900";  // an address of nobody's, which rank 0 does not listen on
    const absl::Status alone = RankLink::Join(LinkOptions(own)).status();
    if (!absl::StrContains(alone.message(), "missing: 1")) return alone.ToString();
    own.name = "127.0.0.1";
    const absl::Status status = RankLink::Join(LinkOptions(own)).status();
    return absl::IsInvalidArgument(status) ? "" : status.ToString();
  });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("rank 0 refuses ranks that do not belong to it") {
  const auto wrong = testing::RunRankProcesses(Ranks(3), [](RankGroupOptions own) -> std::string {
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
          refused([](auto& o) { o.rank = 3; }, absl::StatusCode::kInvalidArgument, "and not 3") +
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
  const auto wrong = testing::RunRankProcesses(Ranks(2), [](RankGroupOptions own) -> std::string {
    RankLink::Options options = LinkOptions(own);
    options.host = absl::StrCat("host-", own.rank);
    const auto link = RankLink::Join(options);
    if (!link.ok()) return link.status().ToString();
    const auto device = testing::TestDevice("portable");
    own.name = "sluice-test-hosts";
    own.members = link->get();
    const absl::Status status = (*device)->JoinRanks(own).status();
    return absl::IsInvalidArgument(status) && absl::StrContains(status.message(), "give each a GPU")
               ? ""
               : status.ToString();
  });
  CHECK(testing::Joined(wrong) == "");
}

// ---- Bytes of caches ----

CacheLayout OneHead() {
  CacheKind kv;
  kv.name = "kv";
  kv.heads = 1;
  kv.block_tokens = 4;
  kv.SetEqualParts(2, 16);
  return {2, {kv}};
}

TEST_CASE("rank 0 writes to the pools of other ranks, and compares") {
  constexpr size_t kPool = size_t{4} << 20;
  const auto wrong = RunLinks(Ranks(3), [](RankLink& link) -> std::string {
    const auto pool = MakePool("dram", OneHead(), kPool);
    std::unique_ptr<RankLink::Landing> landing;
    if (link.rank() != 0) {
      auto opened = link.LandIn(*pool, "");
      if (!opened.ok()) return opened.status().ToString();
      landing = *std::move(opened);
    }
    if (!link.Meet(absl::Seconds(10)).ok()) return "no meeting";
    std::vector<uint8_t> bytes(size_t{3} << 20);
    SplitMix64 random(5);
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random.Below(256));
    constexpr uint64_t kAt = 640;
    if (link.rank() == 0) {
      const auto write = [&](bool compare, size_t pass) {
        const auto writes = link.far()->Begin();
        for (size_t at = 0; at < bytes.size(); at += pass) {
          const size_t n = std::min(pass, bytes.size() - at);
          for (const int rank : {1, 2}) {
            writes->Write(rank, 0, kAt + at, absl::MakeConstSpan(bytes).subspan(at, n), compare);
          }
        }
        return writes->Finish();
      };
      const auto first = write(false, 16 << 10);
      if (!first.ok() || *first) return "not written: " + first.status().ToString();
      const auto same = write(true, 100'000);
      if (!same.ok() || *same) return "not the same: " + same.status().ToString();
      bytes[1 << 20] ^= 1;
      const auto other = write(true, 16 << 10);
      if (!other.ok() || !*other) return "not compared: " + other.status().ToString();
      bytes[1 << 20] ^= 1;
      const auto abandoned = link.far()->Begin();  // nobody waits for it to be finished
      abandoned->Write(1, 0, kAt, absl::MakeConstSpan(bytes), false);
    }
    if (!link.Meet(absl::Seconds(10)).ok()) return "no second meeting";
    if (link.rank() == 0) return "";
    return std::equal(bytes.begin(), bytes.end(), pool->base(0) + kAt) ? "" : "other bytes";
  });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("bytes that do not fit a rank's pool fail the node") {
  const auto wrong = RunLinks(Ranks(2), [](RankLink& link) -> std::string {
    const auto pool = MakePool("dram", OneHead(), 64 << 10);
    std::unique_ptr<RankLink::Landing> landing;
    if (link.rank() == 1) landing = *link.LandIn(*pool, "");
    if (!link.Meet(absl::Seconds(10)).ok()) return "no meeting";
    if (link.rank() == 0) {
      const auto writes = link.far()->Begin();
      writes->Write(1, 0, pool->kind_bytes(0) - 1, std::vector<uint8_t>(2), false);
      if (writes->Finish().ok()) return "it was written";
    }
    while (link.failure().ok()) absl::SleepFor(absl::Milliseconds(10));
    return absl::StrContains(link.failure().message(), "do not fit") ? ""
                                                                     : link.failure().ToString();
  });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("writes to a rank that is killed or stopped end, and say which") {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    RankGroupOptions ranks = Ranks(2);
    ranks.still_limit = absl::Seconds(1);
    const auto wrong = RunLinks(ranks, [signal](RankLink& link) -> std::string {
      const auto pool = MakePool("dram", OneHead(), 4 << 20);
      std::unique_ptr<RankLink::Landing> landing;
      if (link.rank() == 1) landing = *link.LandIn(*pool, "");
      if (!link.Meet(absl::Seconds(10)).ok()) return "no meeting";
      if (link.rank() == 1) {
        if (signal == SIGSTOP && fork() == 0) {  // lets this process end, once rank 0 has seen it
          const pid_t stopped = getppid();
          absl::SleepFor(absl::Seconds(4));
          kill(stopped, SIGKILL);
          _exit(0);
        }
        absl::SleepFor(absl::Milliseconds(200));
        raise(signal);
      }
      const std::vector<uint8_t> bytes(size_t{1} << 20);
      const absl::Time start = absl::Now();
      absl::Status status;
      while (status.ok()) {
        const auto writes = link.far()->Begin();
        writes->Write(1, 0, 0, bytes, false);
        status = writes->Finish().status();
      }
      if (absl::Now() - start > absl::Seconds(3)) return "it took too long";
      return NotBlamed(status, 1);
    });
    CHECK(wrong == std::vector<std::string>{"", "died"});
  }
}

// ---- Claims of pages ----

// Answers to a claim of n bytes with one range, and to the end with how many bytes came so far.
class CountingClaims : public ClaimStream {
 public:
  explicit CountingClaims(std::atomic<int>* broke) : broke_(*broke) {}
  absl::Status Take(const v1::ClaimRequest& request, v1::ClaimAnswer* answer) override {
    if (request.has_broke()) ++broke_;
    claimed_ = request.has_begin();
    if (request.has_end()) answer->set_blocks_landed(sum_);
    if (!request.has_begin()) return absl::OkStatus();
    if (request.begin().payload_bytes() == 0) {
      claimed_ = false;
      return WithReason(absl::AbortedError("busy"), "BLOCK_BUSY");
    }
    sum_ += request.begin().payload_bytes();
    answer->add_ranges()->set_bytes(request.begin().payload_bytes());
    return absl::OkStatus();
  }
  bool claimed() const override { return claimed_; }

 private:
  std::atomic<int>& broke_;
  uint64_t sum_ = 0;
  bool claimed_ = false;
};

v1::ClaimRequest::Begin BytesToCome(uint64_t bytes) {
  v1::ClaimRequest::Begin begin;
  begin.set_payload_bytes(bytes);
  return begin;
}

TEST_CASE("rank 0 answers the claims of other ranks, and its errors keep their reasons") {
  const auto wrong = RunLinks(Ranks(2), [](RankLink& link) -> std::string {
    std::atomic<int> broke = 0;
    const auto meet = [&] { return link.Meet(absl::Seconds(10)).ok(); };
    if (link.rank() == 1) {
      const auto early = link.NewClaimCall()->Begin(BytesToCome(1));
      if (NotBlamed(early.status(), 0) != "") return "served early: " + early.status().ToString();
    }
    if (!meet()) return "no meeting";
    if (link.rank() == 0) {
      link.claims()->ServeWith([&](int) { return std::make_unique<CountingClaims>(&broke); });
    }
    if (!meet()) return "no second meeting";
    std::unique_ptr<ClaimCall> open;
    if (link.rank() == 1) {
      const auto call = link.NewClaimCall();
      for (uint64_t i = 1; i <= 3; ++i) {
        const auto claimed = call->Begin(BytesToCome(i));
        if (!claimed.ok() || claimed->ranges(0).bytes() != i) return "another range";
        const auto landed = call->End(7, false);
        if (!landed.ok() || landed->blocks_landed() != i * (i + 1) / 2) return "another sum";
      }
      const absl::Status busy = call->Begin(BytesToCome(0)).status();
      if (ReasonOf(busy) != "BLOCK_BUSY") return "not busy: " + busy.ToString();
      const auto breaks = link.NewClaimCall();
      if (!breaks->Begin(BytesToCome(1)).ok()) return "not claimed";
      breaks->Broke(absl::CancelledError("the sender is gone"));
      open = link.NewClaimCall();
      if (!open->Begin(BytesToCome(1)).ok()) return "not claimed at last";
      if (!open->End(7, false).ok()) return "not landed at last";
    }
    if (!meet()) return "no third meeting";
    if (link.rank() == 0) {
      while (broke == 0) absl::SleepFor(absl::Milliseconds(1));
      link.claims()->ServeWith(nullptr);  // ends the open one
      if (!link.failure().ok() || broke != 1) return "failed";
    }
    if (!meet()) return "no last meeting";
    if (link.rank() == 0) return "";
    const absl::Status late = open->Begin(BytesToCome(1)).status();
    return absl::IsUnavailable(late) ? "" : "late: " + late.ToString();
  });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("a claim whose stream breaks fails the node, since the rank may still write") {
  const auto wrong = RunLinks(Ranks(2), [](RankLink& link) -> std::string {
    std::atomic<int> broke = 0;
    if (link.rank() == 0) {
      link.claims()->ServeWith([&](int) { return std::make_unique<CountingClaims>(&broke); });
    }
    if (!link.Meet(absl::Seconds(10)).ok()) return "no meeting";
    if (link.rank() == 1) {
      const auto call = link.NewClaimCall();
      if (!call->Begin(BytesToCome(1)).ok()) return "not claimed";
      call->Cancel();
    }
    const absl::Time give_up = absl::Now() + absl::Seconds(10);
    while (link.failure().ok() && absl::Now() < give_up) absl::SleepFor(absl::Milliseconds(5));
    const std::string blamed = NotBlamed(link.failure(), 1);
    if (link.rank() == 0) link.claims()->ServeWith(nullptr);
    return blamed;
  });
  CHECK(testing::Joined(wrong) == "");
}

TEST_CASE("rank 0 knows where a rank takes caches, with the host from which it calls") {
  const auto wrong = RunLinks(Ranks(3), [](RankLink& link) -> std::string {
    const auto pool = MakePool("dram", OneHead(), 64 << 10);
    std::unique_ptr<RankLink::Landing> landing;
    if (link.rank() == 1) landing = *link.LandIn(*pool, "0.0.0.0:7000");
    if (link.rank() == 2) landing = *link.LandIn(*pool, "decode-2:7000");
    if (!link.Meet(absl::Seconds(10)).ok()) return "no meeting";
    if (link.rank() != 0) return "";
    const std::string found = link.IngestAddress(1) + " " + link.IngestAddress(2);
    return found == "127.0.0.1:7000 decode-2:7000" ? "" : found;
  });
  CHECK(testing::Joined(wrong) == "");
  CHECK(SeenAddress("[::]:7000", "ipv6:%5Bfd00::7%5D:5") == "[fd00::7]:7000");
  CHECK(SeenAddress("[::]:7000", "ipv6:%5B::ffff:10.0.0.7%5D:5") == "10.0.0.7:7000");
  CHECK(SeenAddress("10.0.0.1:7000", "ipv4:10.0.0.2:5") == "10.0.0.1:7000");
  CHECK(SeenAddress("0.0.0.0:7000", "unix:/tmp/x") == "");
  CHECK(SeenAddress("", "ipv4:10.0.0.2:5") == "");
}

TEST_CASE("a rank writes, compares and drops the bytes of a chunk, and sums all of them") {
  const auto pool = MakePool("dram", OneHead(), 64 << 10);
  v1::ClaimAnswer answer;
  const auto add = [&](uint64_t offset, uint64_t bytes, bool compare, bool ignore) {
    v1::LandRange* const range = answer.add_ranges();
    range->set_offset(offset);
    range->set_bytes(bytes);
    range->set_compare(compare);
    range->set_ignore(ignore);
  };
  add(100, 40'000, false, false);
  add(50'000, 10, true, false);
  add(60'000, 10, false, true);
  std::vector<uint8_t> payload(40'020);
  SplitMix64 random(3);
  for (uint8_t& b : payload) b = static_cast<uint8_t>(random.Below(256));
  uint8_t* const base = pool->base(0);
  std::copy_n(payload.begin() + 40'000, 10, base + 50'000);
  std::fill_n(base + 60'000, 10, 9);
  for (const bool other : {false, true}) {
    base[50'009] ^= static_cast<uint8_t>(other);
    auto landing = RangeLanding::Begin(answer.ranges(), payload.size(), *pool, true);
    REQUIRE(landing.ok());
    for (size_t at = 0; at < payload.size(); at += 777) {
      landing->Append(absl::MakeConstSpan(payload).subspan(at, 777));
    }
    CHECK(landing->crc32c() == Crc32c(payload));
    CHECK(landing->differs() == other);
    CHECK(std::equal(payload.begin(), payload.begin() + 40'000, base + 100));
    CHECK(std::count(base + 60'000, base + 60'010, 9) == 10);
  }
  CHECK(absl::IsInternal(
      RangeLanding::Begin(answer.ranges(), payload.size() + 1, *pool, true).status()));
  CHECK(absl::IsInternal(
      RangeLanding::Begin(answer.ranges(), payload.size() - 1, *pool, true).status()));
}

}  // namespace
}  // namespace sluice
