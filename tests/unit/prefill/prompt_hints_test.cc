#include "src/prefill/prompt_hints.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <list>
#include <set>
#include <vector>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kLayers = 3, kTopK = 8;

// Returns random selections of the positions [first, end): up to kTopK tokens each.
PromptSelections::Lists Random(int64_t first, int64_t end, SplitMix64& random) {
  PromptSelections::Lists lists;
  lists.positions = {first, end};
  lists.top_k = kTopK;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int64_t position = first; position < end; ++position) {
      std::set<int32_t> chosen;
      const int64_t count = std::min<int64_t>(position + 1, kTopK);
      while (static_cast<int64_t>(chosen.size()) < count) {
        chosen.insert(static_cast<int32_t>(random() % static_cast<uint64_t>(position + 1)));
      }
      lists.counts.push_back(static_cast<int32_t>(chosen.size()));
      std::vector<int32_t> row(chosen.begin(), chosen.end());
      row.resize(kTopK, -1);
      lists.units.insert(lists.units.end(), row.begin(), row.end());
    }
  }
  return lists;
}

TEST_CASE("each token is hinted once, by the newest position that selected it") {
  SplitMix64 random(TestSeed());
  for (const int64_t end : {1, 5, 32, 33, 257}) {
    const int64_t first = std::max<int64_t>(end - PromptSelections::kPositions, 0);
    const PromptSelections::Lists lists = Random(first, end, random);
    for (const int64_t most : {1, 20, 100000}) {
      INFO("up to position " << end << ", at most " << most << " tokens of a layer");
      const SelectionHints hints = HintsOf(lists, kLayers, most);
      CHECK(hints.unit_tokens == 1);
      CHECK(CheckHints(hints, {kLayers, 1, 32, static_cast<uint32_t>(end), most}).ok());
      auto entry = hints.entries.begin();
      for (int layer = 0; layer < kLayers; ++layer) {
        std::set<int32_t> named;
        for (int64_t position = end - 1; position >= first; --position) {
          std::vector<uint32_t> want;
          for (const int32_t token : lists.Of(layer, position)) {
            if (static_cast<int64_t>(named.size()) == most || !named.insert(token).second) continue;
            want.push_back(static_cast<uint32_t>(token));
          }
          if (want.empty()) continue;
          INFO("layer " << layer << " position " << position);
          REQUIRE(entry != hints.entries.end());
          CHECK(entry->layer == static_cast<uint32_t>(layer));
          CHECK_FALSE(entry->kv_head.has_value());
          CHECK(entry->position == static_cast<uint32_t>(position));
          CHECK(entry->units == want);
          ++entry;
        }
      }
      CHECK(entry == hints.entries.end());
    }
  }
}

// Uses `tokens` in a least-recently-used set of `places` tokens, oldest first.
void Use(std::list<int32_t>& lru, size_t places, const std::vector<int32_t>& tokens) {
  for (const int32_t token : tokens) {
    lru.remove(token);
    lru.push_back(token);
  }
  while (lru.size() > places) lru.pop_front();
}

TEST_CASE("a set of the tokens used last is the same after the hints as after every selection") {
  SplitMix64 random(TestSeed());
  const PromptSelections::Lists lists = Random(200, 232, random);
  for (const size_t places : {size_t{kTopK}, size_t{40}, size_t{300}}) {
    const SelectionHints hints = HintsOf(lists, kLayers, static_cast<int64_t>(places));
    for (int layer = 0; layer < kLayers; ++layer) {
      std::list<int32_t> seen, hinted;
      for (int64_t position = 200; position < 232; ++position) {
        const auto row = lists.Of(layer, position);
        Use(seen, places, {row.begin(), row.end()});
      }
      for (auto entry = hints.entries.rbegin(); entry != hints.entries.rend(); ++entry) {
        if (entry->layer != static_cast<uint32_t>(layer)) continue;
        Use(hinted, places, {entry->units.begin(), entry->units.end()});
      }
      // Tokens of one position have the same age.
      INFO(places << " places, layer " << layer);
      CHECK(hinted.size() == seen.size());
      CHECK(std::set<int32_t>(hinted.begin(), hinted.end()).size() == hinted.size());
      if (places == 300) CHECK(std::list<int32_t>(seen) == hinted);
    }
  }
}

TEST_CASE("what a failed device left makes no hint past the prompt") {
  PromptSelections::Lists lists;
  lists.positions = {3, 4};
  lists.top_k = 4;
  lists.units = {-7, 2, 4, 1 << 30};
  lists.counts = {4};
  const SelectionHints hints = HintsOf(lists, 1, 100);
  REQUIRE(hints.entries.size() == 1);
  CHECK(hints.entries[0].units == std::vector<uint32_t>{2});
}

}  // namespace
}  // namespace sluice
