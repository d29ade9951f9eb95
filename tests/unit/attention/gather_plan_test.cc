#include "src/attention/offload/gather_plan.h"

#include <algorithm>
#include <bit>
#include <catch2/catch.hpp>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kHeads = 3;

// The lists of a step: lengths, and who serves the rows.
struct Lists {
  std::vector<int32_t> counts;
  std::vector<uint64_t> servers;
};

Lists Draw(SplitMix64& random, int rows, int workers) {
  Lists lists;
  for (int row = 0; row < rows; ++row) {
    const uint64_t everyone = (uint64_t{1} << workers) - 1;
    lists.servers.push_back(random.Below(5) == 0 ? 0 : random() & everyone);
    for (int head = 0; head < kHeads; ++head) {
      const bool empty = random.Below(3) == 0;
      lists.counts.push_back(empty ? 0 : static_cast<int32_t>(random.Below(random.Below(200) + 1)));
    }
  }
  return lists;
}

// Checks one worker's plan, and adds what it takes to `taken`, by (list, entry).
void CheckPlan(const Lists& lists, GatherPlan& plan, int worker,
               std::map<std::pair<int32_t, int32_t>, int>* taken) {
  plan.Make(worker, lists.counts, lists.servers);
  int64_t entries = 0;
  for (const GatherPlan::Range& range : plan.ranges()) {
    const auto list = static_cast<size_t>(range.list);
    REQUIRE(0 <= range.begin);
    REQUIRE(range.begin < range.end);
    REQUIRE(range.end <= lists.counts[list]);
    REQUIRE((lists.servers[list / kHeads] >> worker & 1) == 1);
    for (int32_t i = range.begin; i < range.end; ++i) ++(*taken)[{range.list, i}];
    entries += range.end - range.begin;
  }
  CHECK(plan.entries() == entries);
}

TEST_CASE("every entry of a served row belongs to one worker") {
  SplitMix64 random(TestSeed());
  for (int round = 0; round < 200; ++round) {
    const int workers = 1 + static_cast<int>(random.Below(5));
    const int rows = 1 + static_cast<int>(random.Below(6));
    const Lists lists = Draw(random, rows, workers);
    GatherPlan plan(rows, kHeads);
    int64_t served = 0;
    for (size_t list = 0; list < lists.counts.size(); ++list) {
      if (lists.servers[list / kHeads] != 0) served += lists.counts[list];
    }
    std::map<std::pair<int32_t, int32_t>, int> taken;
    for (int worker = 0; worker < workers; ++worker) CheckPlan(lists, plan, worker, &taken);
    CHECK(std::ssize(taken) == served);
    CHECK(std::ranges::all_of(taken, [](const auto& entry) { return entry.second == 1; }));
  }
}

TEST_CASE("workers that serve one row have equal shares of one long list") {
  GatherPlan plan(1, kHeads);
  const std::vector<int32_t> counts = {0, 1003, 0};
  const std::vector<uint64_t> servers = {0b1011};
  for (const int worker : {0, 1, 3}) {
    plan.Make(worker, counts, servers);
    CHECK(plan.entries() >= 1003 / 3);
    CHECK(plan.entries() <= 1003 / 3 + 1);
  }
  plan.Make(2, counts, servers);
  CHECK(plan.entries() == 0);
  CHECK(plan.ranges().empty());
}

}  // namespace
}  // namespace sluice
