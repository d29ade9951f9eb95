#include "src/scheduler/admission.h"

#include <catch2/catch.hpp>
#include <deque>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

WaitingSequence Waiting(int64_t context, int64_t total) {
  WaitingSequence sequence;
  sequence.context = context;
  sequence.total = total;
  return sequence;
}

AdmissionHeadroom Headroom(int64_t firm, int64_t soft, int64_t free) {
  AdmissionHeadroom headroom;
  headroom.firm_tokens = firm;
  headroom.soft_tokens = soft;
  headroom.free_tokens = free;
  headroom.home_tokens = 1 << 20;
  return headroom;
}

std::vector<Admission> PlanRanks(std::vector<AdmissionHeadroom> ranks,
                                 const std::vector<WaitingSequence>& waiting, int slots = 8) {
  std::vector<Admission> admissions(3, Admission::kSoft);  // overwritten
  PlanAdmission(slots, absl::MakeSpan(ranks), waiting, &admissions);
  return admissions;
}

std::vector<Admission> Plan(const AdmissionHeadroom& headroom,
                            const std::vector<WaitingSequence>& waiting, int slots = 8) {
  return PlanRanks({headroom}, waiting, slots);
}

constexpr Admission::Kind kFirm = Admission::kFirm, kSoft = Admission::kSoft;

TEST_CASE("first come, first served: a large one at the head is not overtaken") {
  CHECK(Plan(Headroom(100, 100, 100), {Waiting(10, 60), Waiting(10, 60), Waiting(1, 2)}) ==
        std::vector<Admission>{kFirm});
  CHECK(Plan(Headroom(100, 100, 100), {Waiting(1, 2), Waiting(1, 2)}, 1) ==
        std::vector<Admission>{kFirm});
  CHECK(Plan(Headroom(0, 0, 100), {Waiting(1, 2)}).empty());
}

TEST_CASE("beyond what fits, promises are soft, and only with headroom for all that run to grow") {
  const WaitingSequence sequence = Waiting(100, 500);
  CHECK(Plan(Headroom(500, 1000, 600), {sequence, sequence}) ==
        std::vector<Admission>{kFirm, kSoft});
  // 100 + 64 tokens of its own, and 64 of the first, after the first has taken its 100.
  CHECK(Plan(Headroom(500, 1000, 328), {sequence, sequence}) ==
        std::vector<Admission>{kFirm, kSoft});
  CHECK(Plan(Headroom(500, 1000, 327), {sequence, sequence}) == std::vector<Admission>{kFirm});
  AdmissionHeadroom running = Headroom(0, 1000, 300);
  running.growth_tokens = 300 - 164;
  CHECK(Plan(running, {sequence}) == std::vector<Admission>{kSoft});
  running.growth_tokens += 1;
  CHECK(Plan(running, {sequence}).empty());
}

TEST_CASE(
    "headroom is counted by kind: whichever is short decides, and others take what they need") {
  AdmissionHeadroom headroom = Headroom(0, 0, 0);
  headroom.firm_tokens = headroom.free_tokens = TokensByKind({100, 1000});
  WaitingSequence latent;
  latent.context = {30, 400};
  latent.total = {40, 450};
  CHECK(Plan(headroom, {latent, latent, latent}) == std::vector<Admission>{kFirm, kFirm});
  latent.total = {40, 300};
  CHECK(Plan(headroom, {latent, latent, latent}) == std::vector<Admission>{kFirm, kFirm});
  headroom.firm_tokens = TokensByKind({120, 1000});
  CHECK(Plan(headroom, {latent, latent, latent}) == std::vector<Admission>{kFirm, kFirm});
  headroom.free_tokens = TokensByKind({120, 1200});
  CHECK(Plan(headroom, {latent, latent, latent}) == std::vector<Admission>{kFirm, kFirm, kFirm});
  // DRAM counts by kind too: a host cache may lack only one kind.
  latent.home = {0, 8};
  headroom.home_tokens = TokensByKind({1000, 20});
  CHECK(Plan(headroom, {latent, latent, latent}) == std::vector<Admission>{kFirm, kFirm});
}

TEST_CASE("who waits for DRAM is overtaken by those that have theirs, and by nobody else") {
  constexpr Admission::Kind kWait = Admission::kWait;
  WaitingSequence needs = Waiting(10, 20);
  needs.home = 50;
  WaitingSequence needs_little = needs;
  needs_little.home = 10;
  const WaitingSequence has = Waiting(10, 20);
  AdmissionHeadroom headroom = Headroom(100, 100, 100);
  headroom.home_tokens = 60;
  // 50 are left to the first, 10 to the second.
  CHECK(Plan(headroom, {needs, needs_little, has}) == std::vector<Admission>{kFirm, kFirm, kFirm});
  CHECK(Plan(headroom, {needs, needs, has, needs_little, has}) ==
        std::vector<Admission>{kFirm, kWait, kFirm, kWait, kFirm});
  headroom.home_tokens = 49;
  CHECK(Plan(headroom, {needs, needs_little}).empty());
  // HBM and slots allow no overtaking.
  CHECK(Plan(headroom, {needs, Waiting(10, 200), has}).empty());
  CHECK(Plan(headroom, {needs, has, has}, 1) == std::vector<Admission>{kWait, kFirm});
}

TEST_CASE("a soft promise needs a way out in DRAM") {
  AdmissionHeadroom headroom = Headroom(0, 1000, 1000);
  headroom.home_tokens = 499;
  WaitingSequence sequence = Waiting(100, 500);
  CHECK(Plan(headroom, {sequence}).empty());
  sequence.has_home = true;
  CHECK(Plan(headroom, {sequence}) == std::vector<Admission>{kSoft});
  headroom.home_tokens = 999;
  sequence.has_home = false;
  CHECK(Plan(headroom, {sequence, sequence}) == std::vector<Admission>{kSoft});
}

TEST_CASE("nobody younger gets a firm promise before one with a soft promise") {
  AdmissionHeadroom headroom = Headroom(50, 1000, 1000);
  CHECK(Plan(headroom, {Waiting(10, 60), Waiting(10, 40)}) == std::vector<Admission>{kSoft, kSoft});
  headroom.soft_running = true;
  CHECK(Plan(headroom, {Waiting(10, 40)}) == std::vector<Admission>{kSoft});
}

TEST_CASE("who was preempted often or for long comes back with a firm promise or waits") {
  WaitingSequence sequence = Waiting(100, 500);
  sequence.preemptions = kMaxPreemptions;
  CHECK(Plan(Headroom(499, 1000, 1000), {sequence}).empty());
  CHECK(Plan(Headroom(500, 1000, 1000), {sequence}) == std::vector<Admission>{kFirm});
  sequence.preemptions = 1;
  CHECK(Plan(Headroom(499, 1000, 1000), {sequence}) == std::vector<Admission>{kSoft});
  sequence.preempted = kMaxPreempted;
  CHECK(Plan(Headroom(499, 1000, 1000), {sequence}).empty());
}

WaitingSequence On(int rank, int64_t total) {
  WaitingSequence sequence = Waiting(total, total);
  sequence.rank = rank;
  return sequence;
}

TEST_CASE("on each rank first come is first served, and ranks do not wait for one another") {
  constexpr Admission::Kind kWait = Admission::kWait;
  const std::vector<AdmissionHeadroom> ranks = {Headroom(100, 100, 100), Headroom(50, 50, 50)};
  using Plans = std::vector<Admission>;
  CHECK(PlanRanks(ranks, {On(1, 60), On(1, 10), On(0, 80), On(0, 30), On(0, 10)}) ==
        Plans{kWait, kWait, {kFirm, 0}});
  // The slots are those of all ranks.
  CHECK(PlanRanks(ranks, {On(1, 60), On(0, 10), On(0, 10)}, 1) == Plans{kWait, {kFirm, 0}});
  // One that any rank may have goes to the one with the fewest sequences that has room.
  CHECK(PlanRanks(ranks, {On(-1, 10), On(-1, 10), On(-1, 10), On(-1, 60)}) ==
        Plans{{kFirm, 0}, {kFirm, 1}, {kFirm, 0}, {kFirm, 0}});
  std::vector<AdmissionHeadroom> loaded = ranks;
  loaded[0].sequences = 1;
  CHECK(PlanRanks(loaded, {On(-1, 60), On(-1, 10)}) == Plans{{kFirm, 0}, {kFirm, 1}});
  // It overtakes nobody, and nobody overtakes it.
  CHECK(PlanRanks(ranks, {On(1, 60), On(-1, 10)}) == Plans{kWait, {kFirm, 0}});
  CHECK(PlanRanks(ranks, {On(-1, 200), On(0, 10), On(1, 10)}).empty());
  // A sequence that waits for the DRAM of one rank holds up only those that need some there.
  std::vector<AdmissionHeadroom> full = ranks;
  full[0].home_tokens = 5;
  WaitingSequence needs = On(0, 10), needs_any = On(-1, 10), needs_less = On(0, 10);
  needs.home = needs_any.home = 10;
  needs_less.home = 1;
  CHECK(PlanRanks(full, {needs, needs_less, needs_any, On(0, 10)}) ==
        Plans{kWait, kWait, {kFirm, 1}, {kFirm, 0}});
  // A soft promise on one rank does not make those of another soft.
  std::vector<AdmissionHeadroom> soft = ranks;
  soft[0].soft_running = true;
  CHECK(PlanRanks(soft, {On(0, 10), On(1, 10)}) == Plans{{kSoft, 0}, {kFirm, 1}});
}

TEST_CASE("the victim is the latest with a soft promise") {
  CHECK(ChooseVictim({}) == -1);
  CHECK(ChooseVictim({{1, false}, {2, false}}) == -1);
  CHECK(ChooseVictim({{1, false}, {7, true}, {3, true}, {9, false}}) == 1);
}

// A model of the batch with only these two decisions: every sequence ends, however small the memory
// is.
TEST_CASE("whatever arrives, everybody ends, and nobody is preempted more often than is allowed") {
  SplitMix64 random(TestSeed());
  for (int round = 0; round < 60; ++round) {
    struct S {
      uint64_t ticket;
      int64_t length, total;
      bool soft = false;
      int preemptions = 0;
    };
    const int64_t capacity = 200 + static_cast<int64_t>(random.Below(800));
    const double overcommit = 1 + static_cast<double>(random.Below(300)) / 100;
    const auto limit = static_cast<int64_t>(static_cast<double>(capacity) * overcommit);
    std::deque<S> waiting;
    std::vector<S> running;
    for (uint64_t ticket = 0; ticket < 30; ++ticket) {
      const auto total =
          2 + static_cast<int64_t>(random.Below(static_cast<uint64_t>(capacity) - 1));
      waiting.push_back({ticket,
                         1 + static_cast<int64_t>(random.Below(static_cast<uint64_t>(total) - 1)),
                         total});
    }
    int steps = 0;
    while (!waiting.empty() || !running.empty()) {
      REQUIRE(++steps < 100000);
      int64_t firm = 0, promised = 0, used = 0;
      const auto count = [&] {
        firm = promised = used = 0;
        for (const S& s : running) {
          firm += s.soft ? 0 : s.total;
          promised += s.total;
          used += s.length;
        }
        REQUIRE(firm <= capacity);
        REQUIRE(promised <= limit);
        REQUIRE(used <= capacity);
      };
      count();
      for (S& s : running) {
        if (!s.soft) continue;
        if (s.total > capacity - firm) break;
        s.soft = false;
        count();
      }
      AdmissionHeadroom headroom =
          Headroom(std::min(capacity - firm, limit - promised), limit - promised, capacity - used);
      for (const S& s : running) {
        headroom.growth_tokens += std::min(s.total - s.length, kGrowthTokens);
        headroom.soft_running = headroom.soft_running || s.soft;
      }
      std::vector<WaitingSequence> views;
      for (const S& s : waiting) {
        views.push_back(Waiting(s.length, s.total));
        views.back().preemptions = s.preemptions;
      }
      for (const Admission& admission :
           Plan(headroom, views, 16 - static_cast<int>(running.size()))) {
        running.push_back(waiting.front());
        running.back().soft = admission.kind == kSoft;
        waiting.pop_front();
      }
      REQUIRE_FALSE(running.empty());
      std::sort(running.begin(), running.end(),
                [](const S& a, const S& b) { return a.ticket < b.ticket; });
      count();
      // One step: each grows by a token, the oldest first.
      const uint64_t oldest = running.front().ticket;
      bool oldest_grew = false;
      for (size_t i = 0; i < running.size(); ++i) {
        while (used == capacity) {
          std::vector<VictimCandidate> candidates;
          for (const S& s : running) candidates.push_back({s.ticket, s.soft});
          const int victim = ChooseVictim(candidates);
          REQUIRE(victim >= 0);
          S moved = running[static_cast<size_t>(victim)];
          REQUIRE(++moved.preemptions <= kMaxPreemptions);
          used -= moved.length;
          running.erase(running.begin() + victim);
          const auto at = std::find_if(waiting.begin(), waiting.end(),
                                       [&](const S& s) { return s.ticket > moved.ticket; });
          waiting.insert(at, moved);
        }
        if (i >= running.size()) break;
        ++running[i].length;
        ++used;
        oldest_grew = oldest_grew || running[i].ticket == oldest;
      }
      REQUIRE(oldest_grew);
      std::erase_if(running, [](const S& s) { return s.length >= s.total; });
    }
  }
}

}  // namespace
}  // namespace sluice
