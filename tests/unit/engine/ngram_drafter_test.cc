#include "src/engine/ngram_drafter.h"

#include <catch2/catch.hpp>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using Tokens = std::vector<int32_t>;

std::unique_ptr<SequenceDrafter> Begin(int64_t total) { return NewNgramDrafter()->Begin(total); }

Tokens Propose(const SequenceDrafter& drafter, int most) {
  Tokens drafts;
  drafter.Propose(most, &drafts);
  return drafts;
}

Tokens Drafts(const Tokens& tokens, int most) {
  const auto drafter = Begin(static_cast<int64_t>(tokens.size()) + 8);
  drafter->Follow(tokens);
  CHECK(drafter->Expects() == !Propose(*drafter, most).empty());
  return Propose(*drafter, most);
}

TEST_CASE("drafts are what followed the last tokens before") {
  CHECK(Drafts({1, 2, 3, 4, 5, 1, 2}, 3) == Tokens{3, 4, 5});
  CHECK(Drafts({1, 2, 3, 4, 5, 1, 2}, 1) == Tokens{3});
  CHECK(Drafts({1, 2, 3, 4, 5}, 3).empty());
  CHECK(Drafts({1, 2, 3, 4, 2}, 3).empty());  // one token is no match
  CHECK(Drafts({7}, 3).empty());
}

TEST_CASE("the newest occurrence counts, and a longer one before it") {
  CHECK(Drafts({1, 2, 8, 1, 2, 9, 1, 2}, 1) == Tokens{9});
  // 5 1 2 occurred only at the start.
  CHECK(Drafts({5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2}, 1) == Tokens{8});
  CHECK(Drafts({4, 5, 1, 2, 8, 6, 5, 1, 2, 9, 4, 5, 1, 2}, 1) == Tokens{8});
}

TEST_CASE("a loop is drafted past the end of what is known") {
  CHECK(Drafts({9, 1, 2, 3, 1, 2, 3, 1, 2}, 7) == Tokens{3, 1, 2, 3, 1, 2, 3});
  CHECK(Drafts({6, 6, 6}, 4) == Tokens{6, 6, 6, 6});
}

TEST_CASE("following token by token is following at once") {
  SplitMix64 random(TestSeed());
  for (int round = 0; round < 50; ++round) {
    Tokens tokens;
    const auto one = Begin(400);
    for (int i = 0; i < 300; ++i) {
      tokens.push_back(static_cast<int32_t>(random.Below(round % 2 == 0 ? 3 : 30)));
      one->Follow(tokens);
    }
    const auto all = Begin(400);
    all->Follow(tokens);
    CHECK(one->Expects() == all->Expects());
    CHECK(Propose(*one, 5) == Propose(*all, 5));
  }
}

TEST_CASE("drafts stop while they would be wrong, and come back with a text that repeats") {
  // Each pair occurs again and again, and what follows it is always new.
  Tokens tokens;
  const auto drafter = Begin(2000);
  int asked = 0, drafted = 0;
  for (int32_t i = 0; i < 200; ++i) {
    tokens.insert(tokens.end(), {1, 2});
    drafter->Follow(tokens);
    ++asked;
    drafted += drafter->Expects() ? 1 : 0;
    tokens.push_back(1000 + i);
    drafter->Follow(tokens);
  }
  CHECK(drafted > 0);
  CHECK(drafted < asked / 4);
  REQUIRE_FALSE(drafter->Expects());
  int silent = 0;
  for (int i = 0; i < 100; ++i) {
    tokens.push_back(50 + i % 5);
    drafter->Follow(tokens);
    silent = drafter->Expects() ? 0 : silent + 1;
  }
  CHECK(silent == 0);
  CHECK(Propose(*drafter, 2) == Tokens{50, 51});
}

TEST_CASE("a long prompt is indexed a part at a time, and drafts wait for all of it") {
  Tokens tokens(3 * kIndexedAtOnce, 7);
  const auto drafter = Begin(std::ssize(tokens));
  for (int call = 0; call < 3; ++call) {
    CHECK_FALSE(drafter->Expects());
    CHECK(Propose(*drafter, 2).empty());
    drafter->Follow(tokens);
  }
  CHECK(drafter->Expects());
  CHECK(Propose(*drafter, 2) == Tokens{7, 7});
}

TEST_CASE("drafts are tokens of the sequence, whatever its length") {
  SplitMix64 random(TestSeed());
  for (const int64_t total : {1, 2, 3, 4, 5, 63, 64, 65}) {
    const auto drafter = Begin(total);
    Tokens tokens;
    while (std::ssize(tokens) < total) {
      tokens.push_back(static_cast<int32_t>(random.Below(2)));
      drafter->Follow(tokens);
      for (const int32_t draft : Propose(*drafter, 15)) CHECK((draft == 0 || draft == 1));
    }
  }
}

}  // namespace
}  // namespace sluice
