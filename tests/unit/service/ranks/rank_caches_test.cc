// How bytes of caches reach other ranks: rank 0 writes to their pools, or they claim pages of it
// and land the bytes themselves.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "src/base/rng.h"
#include "src/device/rank_group.h"
#include "src/kv/far_heads.h"
#include "src/kv/page_pool.h"
#include "src/service/ranks/far_memory.h"
#include "src/service/ranks/range_landing.h"
#include "src/service/ranks/rank_link.h"
#include "tests/support/ranks.h"
#include "tests/unit/kv/kv_support.h"
#include "tests/unit/service/ranks/rank_link_support.h"

namespace sluice {
namespace {

using testing::MeetingRanks;
using testing::NotBlamed;
using testing::RunLinks;

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
  const auto wrong = RunLinks(MeetingRanks(3), [](RankLink& link) -> std::string {
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
  const auto wrong = RunLinks(MeetingRanks(2), [](RankLink& link) -> std::string {
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
    RankGroupOptions ranks = MeetingRanks(2);
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
  const auto wrong = RunLinks(MeetingRanks(2), [](RankLink& link) -> std::string {
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
  const auto wrong = RunLinks(MeetingRanks(2), [](RankLink& link) -> std::string {
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
  const auto wrong = RunLinks(MeetingRanks(3), [](RankLink& link) -> std::string {
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
