// Parts of lists: how lists are cut, and who claims and finishes parts in random schedules.
#include "src/attention/offload/part_board.h"

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <thread>
#include <vector>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

TEST_CASE("the parts of a list cover it once, in order, and are equal up to the last") {
  for (const int32_t least : {1, 3, 32}) {
    for (int32_t count = 0; count < 3000; ++count) {
      PartWords words;
      const PartBoard board(&words, &count, least);
      const int parts = board.Parts(0);
      const int32_t units = kernels::UnitsOfPart(count, least);
      REQUIRE(parts >= 1);
      REQUIRE(parts <= PartBoard::MostParts(std::max(count, 1), least));
      REQUIRE(units == std::max(least, (count + 31) / 32));
      int32_t end = 0;
      for (int part = 0; part < parts; ++part) {
        const PartBoard::Units of = board.UnitsOf(0, part);
        REQUIRE(of.begin == end);
        REQUIRE((of.end - of.begin == units || (part == parts - 1 && of.end - of.begin <= units)));
        REQUIRE((of.end > of.begin || count == 0));
        end = of.end;
      }
      REQUIRE(end == count);
    }
  }
  CHECK(PartBoard::MostParts(1, 32) == 1);
  CHECK(PartBoard::MostParts(33, 32) == 2);
  CHECK(PartBoard::MostParts(1 << 20, 32) == 32);
}

// A round of simulated workers that take turns at random. Each goes through parts of its own, then
// through all lists.
class Schedule {
 public:
  Schedule(uint64_t seed, bool some_die) : random_(seed), some_die_(some_die) {
    const auto lists = 1 + random_.Below(12);
    for (uint64_t i = 0; i < lists; ++i) {
      counts_.push_back(static_cast<int32_t>(random_.Below(random_.Below(2) == 0 ? 8 : 300)));
    }
    words_.resize(lists);
    workers_.resize(1 + random_.Below(8));
    for (Worker& w : workers_) w.at = random_.Below(lists);
    const auto least = static_cast<int32_t>(1 + random_.Below(8));
    board_ = std::make_unique<PartBoard>(words_.data(), counts_.data(), least);
    for (uint64_t i = 0; i < lists; ++i) {
      claims_.emplace_back(static_cast<size_t>(board_->Parts(static_cast<int64_t>(i))));
    }
    lost_.resize(lists);
    ends_.resize(lists);
  }

  void Run() {
    size_t going = workers_.size();
    while (going > 0) {
      Worker& w = workers_[random_.Below(workers_.size())];
      if (w.gone) continue;
      Turn(w);
      if (w.gone) --going;
    }
  }

  void Check() const {
    bool alive = false;
    for (const Worker& w : workers_) alive |= !w.died;
    for (size_t list = 0; list < counts_.size(); ++list) {
      for (const int claims : claims_[list]) {
        REQUIRE(claims <= 1);
        if (alive) REQUIRE(claims == 1);
      }
      if (lost_[list] || !alive) {
        REQUIRE(ends_[list] <= (lost_[list] ? 0 : 1));
      } else {
        REQUIRE(ends_[list] == 1);
      }
    }
  }
  int deaths() const {
    int out = 0;
    for (const Worker& w : workers_) out += w.died ? 1 : 0;
    return out;
  }

 private:
  struct Worker {
    size_t at = 0;        // list
    size_t searched = 0;  // lists
    int part = -1;        // what it has claimed of `at`
    bool gone = false, died = false;
  };

  void Turn(Worker& w) {
    if (w.part >= 0) {
      if (some_die_ && random_.Below(40) == 0) {
        lost_[w.at] = w.gone = w.died = true;
        return;
      }
      ends_[w.at] += board_->Finish(static_cast<int64_t>(w.at), w.part) ? 1 : 0;
      w.part = -1;
      return;
    }
    const auto list = static_cast<int64_t>(w.at);
    const int parts = board_->Parts(list);
    const auto begin = static_cast<int>(random_.Below(static_cast<uint64_t>(parts)));
    w.part = board_->Claim(list, begin, parts);
    if (w.part < 0) w.part = board_->Claim(list, 0, parts);
    if (w.part >= 0) {
      ++claims_[w.at][static_cast<size_t>(w.part)];
    } else if (++w.searched == counts_.size()) {
      w.gone = true;
    } else {
      w.at = (w.at + 1) % counts_.size();
    }
  }

  SplitMix64 random_;
  const bool some_die_;
  std::vector<int32_t> counts_;
  std::vector<PartWords> words_;
  std::unique_ptr<PartBoard> board_;
  std::vector<Worker> workers_;
  std::vector<std::vector<int>> claims_;  // [lists][parts]
  std::vector<bool> lost_;                // [lists] a worker died with a part of it
  std::vector<int> ends_;                 // [lists] how often Finish said that it was the last
};

TEST_CASE(
    "in 10,000 random schedules each part is claimed once, and each list ends once or never") {
  const uint64_t seed = TestSeed();
  int deaths = 0;
  for (uint64_t i = 0; i < 10000; ++i) {
    INFO("seed " << seed + i);
    Schedule schedule(seed + i, i % 2 == 1);
    schedule.Run();
    schedule.Check();
    deaths += schedule.deaths();
  }
  CHECK(deaths > 1000);
}

TEST_CASE(
    "threads that claim parts at the same time each see the results of those before the last") {
  constexpr int kThreads = 4, kLists = 64;
  const std::vector<int32_t> counts(kLists, 29);
  for (int round = 0; round < 50; ++round) {
    std::vector<PartWords> words(kLists);
    const PartBoard board(words.data(), counts.data(), 1);
    std::vector<int> results(size_t{kLists} * kernels::kMostListParts);
    std::atomic<int> ends{0}, wrong{0};
    const auto work = [&] {
      for (int list = 0; list < kLists; ++list) {
        int* const of_list = results.data() + size_t{kernels::kMostListParts} * list;
        for (int part; (part = board.Claim(list, 0, board.Parts(list))) >= 0;) {
          ++of_list[part];
          if (!board.Finish(list, part)) continue;
          ++ends;
          if (std::count(of_list, of_list + 29, 1) != 29) ++wrong;
        }
      }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) threads.emplace_back(work);
    for (std::thread& t : threads) t.join();
    REQUIRE(ends.load() == kLists);
    REQUIRE(wrong.load() == 0);
  }
}

}  // namespace
}  // namespace sluice
