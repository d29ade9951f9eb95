// The arbiter of parts that a device pulls, in random schedules of one thread: CPU workers, pullers
// and the arbiter take turns, and some of them die or give up.
#include "src/attention/offload/part_arbiter.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <memory>
#include <vector>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

enum class Fault { kNone, kWorkerDies, kArbiterDies, kPullerGivesUp };

struct Part {
  int64_t list;
  int part;
};

// The words of both sides.
struct Words {
  explicit Words(int pullers)
      : asks(static_cast<size_t>(pullers)), grants(static_cast<size_t>(pullers)) {}
  PullWords view() { return {asks.data(), grants.data(), &closed, &missed}; }

  std::vector<kernels::PullAsk> asks;
  std::vector<kernels::PullGrant> grants;
  uint32_t closed = 0, missed = 0;
};

// The lists of a round, and who has done what.
class Round {
 public:
  explicit Round(SplitMix64& random) {
    const auto lists = 1 + random.Below(12);
    const bool streams = random.Below(10) == 0;  // no list has anything
    for (uint64_t i = 0; i < lists; ++i) {
      const auto longest = random.Below(2) == 0 ? 8u : 300u;
      counts_.push_back(streams ? 0 : static_cast<int32_t>(random.Below(longest)));
    }
    words_.resize(lists);
    const auto least = static_cast<int32_t>(1 + random.Below(8));
    board_ = std::make_unique<PartBoard>(words_.data(), counts_.data(), least);
    for (uint64_t i = 0; i < lists; ++i) {
      done_.emplace_back(static_cast<size_t>(board_->Parts(static_cast<int64_t>(i))));
    }
    ends_.resize(lists);
  }

  const PartBoard& board() const { return *board_; }
  int64_t lists() const { return std::ssize(counts_); }
  int32_t count(int64_t list) const { return counts_[static_cast<size_t>(list)]; }
  void Do(const Part& p) { ++done_[static_cast<size_t>(p.list)][static_cast<size_t>(p.part)]; }
  void Finish(const Part& p) {
    ends_[static_cast<size_t>(p.list)] += board_->Finish(p.list, p.part) ? 1 : 0;
  }

  int MostDone() const {
    int most = 0;
    for (const auto& list : done_)
      most = std::max(most, *std::max_element(list.begin(), list.end()));
    return most;
  }
  // Returns whether every part of the list is done.
  bool Done(int64_t list) const {
    const auto& of = done_[static_cast<size_t>(list)];
    return std::find(of.begin(), of.end(), 0) == of.end();
  }
  int ends(int64_t list) const { return ends_[static_cast<size_t>(list)]; }

 private:
  std::vector<int32_t> counts_;
  std::vector<PartWords> words_;
  std::unique_ptr<PartBoard> board_;
  std::vector<std::vector<int>> done_;  // [lists][parts]
  std::vector<int> ends_;               // [lists] how often Finish said that it was the last
};

// An actor takes steps until it is gone.
class Actor {
 public:
  virtual ~Actor() = default;
  virtual void Step() = 0;
  bool gone = false;
};

class Worker : public Actor {
 public:
  Worker(Round& round, uint64_t at) : round_(round), at_(static_cast<int64_t>(at)) {}
  void Step() override {
    if (part_ >= 0) {
      if (!did_) {
        round_.Do({at_, part_});
      } else {
        round_.Finish({at_, part_});
        part_ = -1;
      }
      did_ = !did_;
      return;
    }
    part_ = round_.board().Claim(at_, 0, round_.board().Parts(at_));
    if (part_ >= 0) return;
    at_ = (at_ + 1) % round_.lists();
    gone = ++searched_ == round_.lists();
  }

 private:
  Round& round_;
  int64_t at_, searched_ = 0;
  int part_ = -1;
  bool did_ = false;
};

// A puller as kernels/pull_params.h describes it.
class Puller : public Actor {
 public:
  Puller(Round& round, Words& words, size_t index)
      : round_(round), words_(words), index_(index), ask_(words.asks[index].number) {}
  void Step() override {
    if (!began_) {
      began_ = true;
      gone = words_.closed != 0;
      if (!gone) Ask();
      return;
    }
    if (part_.list >= 0) {
      round_.Do(part_);
      part_.list = -1;
      gone = gave_up;
      return;
    }
    const kernels::PullGrant& grant = words_.grants[index_];
    if (grant.number != ask_) return;
    part_ = {grant.list, grant.part};
    if (grant.list >= 0) {
      ++parts;
      return Ask();
    }
    ++told;
    gone = true;
  }
  void GiveUp() {
    words_.missed = 1;
    gave_up = true;
    gone = part_.list < 0;
  }
  bool waits() const {
    return began_ && !gone && !gave_up && part_.list < 0 && words_.grants[index_].number != ask_;
  }

  int told = 0, parts = 0;
  bool gave_up = false;

 private:
  void Ask() { words_.asks[index_].number = ++ask_; }

  Round& round_;
  Words& words_;
  const size_t index_;
  uint32_t ask_;
  bool began_ = false;
  Part part_{-1, 0};
};

// The host's arbiter, in the steps of PullShare.
class ArbiterActor : public Actor {
 public:
  ArbiterActor(Round& round, PartArbiter& arbiter) : round_(round), arbiter_(arbiter) {
    arbiter_.Begin();
    refused = arbiter_.closed() || arbiter_.missed();
    for (int64_t list = 0; list < round_.lists(); ++list) {
      if (round_.count(list) > 0) arbiter_.Offer(list);
    }
  }
  void Step() override {
    if (refused) {
      arbiter_.Close();
      gone = true;
      return;
    }
    if (granted_.list >= 0) {
      round_.Finish(granted_);
      granted_.list = -1;
    } else if (claimed_) {
      arbiter_.Grant(puller_, part_);
      granted_ = {part_.list, part_.part};
      claimed_ = false;
    } else if ((puller_ = arbiter_.Asking()) >= 0) {
      part_ = arbiter_.Claim(round_.board());
      claimed_ = true;
    } else if (arbiter_.missed()) {
      failed = gone = true;
    }
    if (arbiter_.over()) gone = true;
  }
  bool failed = false, refused = false;

 private:
  Round& round_;
  PartArbiter& arbiter_;
  int puller_ = -1;
  bool claimed_ = false;
  PartArbiter::Part part_;
  Part granted_{-1, 0};
};

struct Outcome {
  int64_t by_device = 0, parts = 0;
  bool died = false, gave_up = false, closed = false;
};

class Schedule {
 public:
  explicit Schedule(uint64_t seed)
      : random_(seed),
        pullers_(static_cast<int>(1 + random_.Below(8))),
        words_(pullers_),
        arbiter_(words_.view(), pullers_) {}

  // Runs a round in a random order. The fault happens at a random step, if it happens at all.
  Outcome Run(Fault fault) {
    Round round(random_);
    std::vector<Worker> workers;
    // Where the device takes nothing there is a worker, or nobody would do anything.
    const uint64_t least = arbiter_.closed() || arbiter_.missed() ? 1 : 0;
    for (uint64_t i = least + random_.Below(4); i > 0; --i) {
      workers.emplace_back(round, random_.Below(static_cast<uint64_t>(round.lists())));
    }
    std::vector<Puller> pullers;
    for (int i = 0; i < pullers_; ++i) pullers.emplace_back(round, words_, static_cast<size_t>(i));
    ArbiterActor arbiter(round, arbiter_);
    std::vector<Actor*> actors = {&arbiter};
    for (Worker& w : workers) actors.push_back(&w);
    for (Puller& p : pullers) actors.push_back(&p);

    Outcome out;
    uint64_t until = random_.Below(200);
    for (;;) {
      std::erase_if(actors, [](const Actor* a) { return a->gone; });
      if (actors.empty()) break;
      if (until-- == 0) Strike(fault, workers, pullers, arbiter, &out);
      Actor* const next = actors[random_.Below(actors.size())];
      if (!next->gone) next->Step();
      // Where the arbiter is gone a wait ends with the deadline.
      for (Puller& p : pullers) {
        if (arbiter.gone && p.waits()) p.GiveUp();
      }
    }
    if (!arbiter_.over() && !arbiter.refused) arbiter_.Close();  // as PullShare does
    Check(round, workers, pullers, arbiter, out.died);
    for (const Puller& p : pullers) {
      out.gave_up |= p.gave_up;
      out.by_device += p.parts;
    }
    for (int64_t list = 0; list < round.lists(); ++list) out.parts += round.board().Parts(list);
    out.closed = arbiter_.closed();
    return out;
  }

 private:
  void Strike(Fault fault, std::vector<Worker>& workers, std::vector<Puller>& pullers,
              ArbiterActor& arbiter, Outcome* out) {
    if (fault == Fault::kWorkerDies && !workers.empty() && !workers[0].gone) {
      workers[0].gone = out->died = true;
    }
    if (fault == Fault::kArbiterDies && !arbiter.gone) arbiter.gone = out->died = true;
    if (fault == Fault::kPullerGivesUp) {
      const auto waits =
          std::find_if(pullers.begin(), pullers.end(), [](const Puller& p) { return p.waits(); });
      if (waits != pullers.end()) waits->GiveUp();
    }
  }

  void Check(const Round& round, const std::vector<Worker>& workers,
             const std::vector<Puller>& pullers, const ArbiterActor& arbiter, bool died) const {
    REQUIRE(round.MostDone() <= 1);
    bool gave_up = false;
    for (const Puller& p : pullers) {
      REQUIRE(p.told <= 1);
      gave_up |= p.gave_up;
    }
    // The sequences of a round end if the arbiter could not end it or somebody has died. In all
    // other rounds everything is done, and said to be done once.
    const bool healthy = !died && !arbiter.failed;
    for (int64_t list = 0; list < round.lists(); ++list) {
      REQUIRE(round.ends(list) <= 1);
      // A list counts as finished only if it is, unless a grant was lost, which ends the sequences.
      if (round.ends(list) == 1 && !arbiter.failed && !gave_up) REQUIRE(round.Done(list));
      if (!healthy) continue;
      // Empty lists are the workers' alone.
      if (workers.empty() && round.count(list) == 0) continue;
      REQUIRE(round.Done(list));
      REQUIRE(round.ends(list) == 1);
    }
    if (healthy && !gave_up && !arbiter.refused) {
      REQUIRE(arbiter_.over());
      for (const Puller& p : pullers) REQUIRE(p.told == 1);
    }
  }

  SplitMix64 random_;
  const int pullers_;
  Words words_;
  PartArbiter arbiter_;
};

TEST_CASE("in 10,000 random schedules the device and the workers do each part once") {
  const uint64_t seed = TestSeed();
  int64_t by_device = 0, parts = 0;
  for (uint64_t i = 0; i < 10000; ++i) {
    INFO("seed " << seed + i);
    Schedule schedule(seed + i);
    for (int round = 0; round < 3; ++round) {  // the numbers go on
      const Outcome out = schedule.Run(Fault::kNone);
      REQUIRE_FALSE(out.gave_up);
      REQUIRE_FALSE(out.closed);
      by_device += out.by_device;
      parts += out.parts;
    }
  }
  CHECK(by_device > parts / 5);
  CHECK(by_device < parts * 9 / 10);
}

TEST_CASE("whoever dies or gives up in 10,000 random schedules, nothing is done twice or lost") {
  const uint64_t seed = TestSeed();
  int deaths = 0, gave_up = 0, closed = 0;
  for (uint64_t i = 0; i < 10000; ++i) {
    INFO("seed " << seed + i);
    Schedule schedule(seed + i);
    constexpr Fault kFaults[] = {Fault::kWorkerDies, Fault::kArbiterDies, Fault::kPullerGivesUp};
    const Outcome out = schedule.Run(kFaults[i % 3]);
    deaths += out.died ? 1 : 0;
    gave_up += out.gave_up ? 1 : 0;
    closed += out.closed ? 1 : 0;
    // Later rounds are whole, with the device or without it.
    for (int round = 0; round < 2; ++round) schedule.Run(Fault::kNone);
  }
  CHECK(deaths > 1000);
  CHECK(gave_up > 1000);
  CHECK(closed > 1000);
}

TEST_CASE("the arbiter takes the last parts of all lists in turn, from the last list on") {
  const std::vector<int32_t> counts = {3, 1, 2};
  std::vector<PartWords> words(counts.size());
  const PartBoard board(words.data(), counts.data(), 1);
  Words pulled(1);
  PartArbiter arbiter(pulled.view(), 1);
  for (int round = 0; round < 2; ++round) {
    std::fill(words.begin(), words.end(), PartWords{});
    arbiter.Begin();
    for (int64_t list = 0; list < 3; ++list) arbiter.Offer(list);
    CHECK(board.Claim(0, 0, 3) == 0);  // by a worker
    std::vector<std::pair<int64_t, int>> taken;
    for (PartArbiter::Part part = arbiter.Claim(board); part.list >= 0;
         part = arbiter.Claim(board)) {
      taken.emplace_back(part.list, part.part);
    }
    CHECK(taken == std::vector<std::pair<int64_t, int>>{{2, 1}, {1, 0}, {0, 2}, {2, 0}, {0, 1}});
  }
}

}  // namespace
}  // namespace sluice
