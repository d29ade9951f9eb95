// Tests of sequences that have more of one kind than of another.
#include <map>
#include <set>

#include "src/base/rng.h"
#include "src/kv/page_pool.h"
#include "src/kv/sequence_cache.h"
#include "tests/test_main.h"
#include "tests/unit/kv/transfer_support.h"

namespace sluice {
namespace {

constexpr int64_t kAny = int64_t{1} << 40;  // for kinds whose tokens do not matter

std::unique_ptr<PagePool> MakeShaped(const TokensByKind& proportion, size_t bytes,
                                     double overcommit = 1) {
  auto pool = PagePool::Create(
      "hbm", TierShape{TwoKinds(), proportion},
      Buffer(std::calloc(bytes, 1), bytes, [](void* p, size_t) { std::free(p); }), overcommit);
  REQUIRE(pool.ok());
  return *std::move(pool);
}

TEST_CASE("tokens by kind: a number means every kind, a list those that it names") {
  const TokensByKind all = 5;
  for (size_t kind = 0; kind < TokensByKind::kMaxKinds; ++kind) CHECK(all[kind] == 5);
  const TokensByKind some = {7, 2};
  CHECK(some[0] == 7);
  CHECK(some[1] == 2);
  CHECK(some[2] == 0);
  CHECK(some.most() == 7);
  CHECK(some.least() == 0);
  CHECK(TokensByKind({5, 2}).Within(all));
  CHECK_FALSE(some.Within(all));
  CHECK(some + TokensByKind({1, 3}) == TokensByKind({8, 5}));
  CHECK(Least(some, 4) == TokensByKind({4, 2}));
  CHECK(TwoKinds().Describe(9) == "9");
  CHECK(TwoKinds().Describe({9, 4}) == "kv 9, index 4");
}

TEST_CASE("an arena is divided in the proportion of tokens that sequences take") {
  const CacheLayout layout = TwoKinds();
  for (const TokensByKind& proportion : {TokensByKind(1), TokensByKind({1, 5}), {4, 1}}) {
    const auto pool = MakeShaped(proportion, 1 << 20);
    const TokensByKind capacity = pool->Capacity();
    const auto ratio = static_cast<double>(capacity[1]) / static_cast<double>(capacity[0]);
    const auto wanted = static_cast<double>(proportion[1]) / static_cast<double>(proportion[0]);
    CHECK(ratio == Approx(wanted).epsilon(0.01));
    CHECK(pool->CouldEverFit(capacity));
    CHECK_FALSE(pool->CouldEverFit(capacity + TokensByKind({1, 0})));
    CHECK_FALSE(pool->CouldEverFit(capacity + TokensByKind({0, 1})));
    // Hardly anything is left over.
    CHECK(layout.BytesFor(capacity) > (1 << 20) - (24 << 10));
  }
}

TEST_CASE("a kind that runs out refuses, whatever is left of the others") {
  const auto pool = MakeShaped({1, 4}, 256 << 10);
  const TokensByKind most = pool->Capacity();
  const Reservation all = pool->TryReserve({most[0], 0});
  REQUIRE_FALSE(all.empty());
  CHECK(pool->TryReserve({1, 1}).empty());
  CHECK(pool->TryReserve(1).empty());
  const Reservation rest = pool->TryReserve({0, most[1]});
  CHECK_FALSE(rest.empty());
  CHECK(pool->HeadroomNow().firm_tokens[0] == 0);
  CHECK(pool->HeadroomNow().firm_tokens[1] == 0);
}

TEST_CASE("a kind goes back alone, with its promise, and comes again") {
  const auto pool = MakePool("dram", TwoKinds(), 256 << 10);
  SequenceCache cache(pool.get(), pool->TryReserve({200, 50}));
  cache.EnsureTokens({100, 50});
  CHECK(cache.tokens(0) >= 100);
  CHECK(cache.tokens(1) >= 50);
  const int64_t kv_used = pool->UsageOf(0).used_bytes,
                kv_promised = pool->UsageOf(0).reserved_bytes;
  const std::vector<int32_t> pages = cache.Pages(1, 0);

  cache.ShrinkTo({kAny, 0});
  CHECK(cache.tokens(1) == 0);
  CHECK(cache.tokens() == 0);
  CHECK(pool->UsageOf(1).used_bytes == 0);
  CHECK(pool->UsageOf(1).reserved_bytes == 0);
  CHECK(pool->UsageOf(0).used_bytes == kv_used);
  CHECK(pool->UsageOf(0).reserved_bytes == kv_promised);
  CHECK(cache.Pages(1, 0) == pages);
  CHECK(cache.Lacks({200, 70}) == TokensByKind({0, 70}));
  CHECK(cache.Covers({200, 0}));
  CHECK(cache.EnsureTokens({180, 0}) == SequenceCache::Growth::kAdded);
  CHECK(cache.EnsureTokens({180, 0}) == SequenceCache::Growth::kNone);

  REQUIRE(cache.Extend({0, 70}));
  CHECK(cache.Covers({200, 70}));
  CHECK(cache.EnsureTokens({200, 70}) == SequenceCache::Growth::kAdded);
  CHECK(cache.tokens() >= 70);
}

TEST_CASE("shrinking in part gives back the last pages and keeps the first") {
  const auto pool = MakePool("hbm", TwoKinds(), 256 << 10);
  SequenceCache cache(pool.get(), pool->TryReserve(200));
  cache.EnsureTokens(120);
  const std::vector<int32_t> before = cache.Pages(0, 0);
  cache.ShrinkTo({90, kAny});
  CHECK(cache.tokens(0) == 92);  // blocks of 4
  CHECK(std::equal(cache.Pages(0, 0).begin(), cache.Pages(0, 0).end(), before.begin()));
  CHECK_FALSE(cache.Covers(93));
  CHECK(cache.Covers({92, 200}));
  CHECK(pool->UsageOf(0).reserved_bytes == 2 * 23 * TwoKinds().kinds[0].page_bytes());
}

TEST_CASE("a transfer takes of each kind what the policy wants, and says what is too much") {
  // One kind stays in DRAM and grows there; the other only waits there.
  Table t(256 << 10, 0, [](int64_t context, int64_t total) -> Footprint {
    return {{total, context}, {total / 4, total}};
  });
  const std::string id = t.ReserveAndFill();
  const CacheLayout& layout = t.layout;
  const int64_t end = kContext + 10;
  CHECK(t.dram->UsageOf(0).reserved_bytes ==
        layout.PagesFor(0, end) * layout.kinds[0].page_bytes());
  CHECK(t.dram->UsageOf(1).reserved_bytes ==
        layout.PagesFor(1, kContext) * layout.kinds[1].page_bytes());
  REQUIRE(t.table->Commit(id, {}, nullptr).ok());
  t.clock.Advance(absl::Seconds(11));
  t.Reap();
  CHECK(t.Empty());

  Manifest large = t.Good();
  large.prompt_token_ids.assign(900, 5);
  large.context_length = 900;
  Table small(40 << 10, 0, [](int64_t context, int64_t total) -> Footprint {
    return {{total, context}, 1};
  });
  const absl::Status never = small.table->Reserve(large).status();
  CHECK(absl::IsInvalidArgument(never));
  CHECK_THAT(std::string(never.message()), Catch::Contains("kv 910, index 900 tokens"));
}

// A model of a pool that only counts.
struct Counts {
  TokensByKind promised, taken;  // pages
  bool firm = true;
};

void RandomOperations(double overcommit, const TokensByKind& proportion) {
  SplitMix64 random(TestSeed());
  const CacheLayout layout = TwoKinds();
  const auto pool = MakeShaped(proportion, 96 << 10, overcommit);
  const TokensByKind capacity = pool->Capacity();
  struct Sequence {
    std::unique_ptr<SequenceCache> cache;
    Counts counts;
  };
  std::vector<Sequence> alive;
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random.Below(static_cast<uint64_t>(n)));
  };
  const auto some_tokens = [&] {
    return TokensByKind({random.Below(4) == 0 ? 0 : below(capacity[0] / 3),
                         random.Below(4) == 0 ? 0 : below(capacity[1] / 3)});
  };
  const auto pages_of = [&](const TokensByKind& tokens) {
    return TokensByKind({layout.PagesFor(0, tokens[0]), layout.PagesFor(1, tokens[1])});
  };
  TokensByKind all, limit;
  for (size_t kind = 0; kind < 2; ++kind) {
    all[kind] = pool->UsageOf(kind).capacity_bytes / layout.kinds[kind].page_bytes();
    limit[kind] = static_cast<int64_t>(static_cast<double>(all[kind]) * overcommit);
  }
  const auto sums = [&] {
    Counts sum;
    TokensByKind firm;
    for (const Sequence& s : alive) {
      sum.promised += s.counts.promised;
      sum.taken += s.counts.taken;
      if (s.counts.firm) firm += s.counts.promised;
    }
    return std::make_pair(sum, firm);
  };
  std::map<std::string, int> met;
  for (int round = 0; round < 6000; ++round) {
    const auto [sum, firm] = sums();
    const uint64_t what = random.Below(8);
    if (what == 0 || alive.empty()) {
      const TokensByKind tokens = some_tokens(), pages = pages_of(tokens);
      const bool soft = overcommit > 1 && random.Below(2) == 0;
      Reservation made = pool->TryReserve(tokens, soft ? Promise::kSoft : Promise::kFirm);
      const bool room = (sum.promised + pages).Within(limit) && pages.Within(all) &&
                        (soft || (firm + pages).Within(all));
      REQUIRE(made.empty() == !room);
      ++met[room ? "reserved" : "refused"];
      if (!room) continue;
      alive.push_back(
          {std::make_unique<SequenceCache>(pool.get(), std::move(made)), {pages, 0, !soft}});
      continue;
    }
    const size_t at = random.Below(alive.size());
    Sequence& s = alive[at];
    if (what == 1) {
      alive.erase(alive.begin() + static_cast<int64_t>(at));
    } else if (what <= 4) {  // grows, perhaps only in one kind
      TokensByKind to;
      for (size_t kind = 0; kind < 2; ++kind) {
        const int64_t most =
            s.counts.promised[kind] / layout.layers * layout.kinds[kind].block_tokens;
        to[kind] = below(most + 1);
      }
      const SequenceCache::Growth growth = s.cache->EnsureTokens(to);
      if (growth == SequenceCache::Growth::kNoRoom) {
        REQUIRE(overcommit > 1);
        ++met["no room"];
      } else {
        ++met["grown"];
        for (size_t kind = 0; kind < 2; ++kind) REQUIRE(s.cache->tokens(kind) >= to[kind]);
      }
    } else if (what == 5) {
      const TokensByKind to = random.Below(2) == 0 ? TokensByKind({kAny, below(capacity[1] / 3)})
                                                   : TokensByKind({below(capacity[0] / 3), kAny});
      s.cache->ShrinkTo(to);
      s.counts.promised = Least(s.counts.promised, pages_of(to));
      for (size_t kind = 0; kind < 2; ++kind) {
        REQUIRE(s.cache->tokens(kind) < to[kind] + layout.kinds[kind].block_tokens);
      }
    } else if (what == 6 && s.counts.firm) {
      const TokensByKind pages = pages_of(some_tokens());
      TokensByKind tokens, more;
      for (size_t kind = 0; kind < 2; ++kind) {
        tokens[kind] = pages[kind] / layout.layers * layout.kinds[kind].block_tokens;
        more[kind] = std::max<int64_t>(pages[kind] - s.counts.promised[kind], 0);
      }
      const bool room = (sum.promised + more).Within(limit) && (firm + more).Within(all);
      REQUIRE(s.cache->Extend(tokens) == room);
      ++met[room ? "extended" : "not extended"];
      if (room) s.counts.promised += more;
      if (room) REQUIRE(s.cache->Covers(tokens));
    } else if (what == 7 && !s.counts.firm) {
      const bool room = (firm + s.counts.promised).Within(all);
      REQUIRE(s.cache->MakeFirm() == room);
      s.counts.firm = room;
      ++met[room ? "made firm" : "not made firm"];
    }
    // The sequences own what the pool says they own, and no page has two owners.
    for (Sequence& one : alive) {
      for (size_t kind = 0; kind < 2; ++kind) {
        const size_t blocks = one.cache->Pages(0, kind).size();
        REQUIRE(one.cache->Pages(1, kind).size() == blocks);
        one.counts.taken[kind] = static_cast<int64_t>(blocks) * layout.layers;
        REQUIRE(one.counts.taken[kind] <= one.counts.promised[kind]);
      }
    }
    const auto [now, firm_now] = sums();
    REQUIRE(firm_now.Within(all));
    const PagePool::Headroom room = pool->HeadroomNow();
    for (size_t kind = 0; kind < 2; ++kind) {
      const CacheKind& of = layout.kinds[kind];
      const auto tokens = [&](int64_t pages) { return pages / layout.layers * of.block_tokens; };
      const PagePool::Usage usage = pool->UsageOf(kind);
      REQUIRE(usage.reserved_bytes == now.promised[kind] * of.page_bytes());
      REQUIRE(usage.used_bytes == now.taken[kind] * of.page_bytes());
      const int64_t unpromised = limit[kind] - now.promised[kind];
      REQUIRE(room.firm_tokens[kind] == tokens(std::min(unpromised, all[kind] - firm_now[kind])));
      REQUIRE(room.soft_tokens[kind] == tokens(std::min(unpromised, all[kind])));
      REQUIRE(room.free_tokens[kind] == tokens(all[kind] - now.taken[kind]));
      std::set<int32_t> owned;
      for (const Sequence& one : alive) {
        for (int layer = 0; layer < layout.layers; ++layer) {
          for (const int32_t page : one.cache->Pages(layer, kind)) {
            REQUIRE(owned.insert(page).second);
          }
        }
      }
      for (const PageRun& run : pool->FreeRuns(kind)) {
        for (int32_t page = run.first; page < run.first + run.count; ++page) {
          REQUIRE(owned.insert(page).second);
        }
      }
      REQUIRE(static_cast<int64_t>(owned.size()) == all[kind]);
    }
  }
  for (const char* name : {"reserved", "refused", "grown", "extended", "not extended"}) {
    CHECK(met[name] > 0);
  }
  if (overcommit > 1) {
    for (const char* name : {"no room", "made firm", "not made firm"}) CHECK(met[name] > 0);
  }
  alive.clear();
  for (size_t kind = 0; kind < 2; ++kind) CHECK(pool->UsageOf(kind).reserved_bytes == 0);
}

TEST_CASE("whatever grows, shrinks and comes again by kind, the pool counts as a model does") {
  RandomOperations(1, 1);
  RandomOperations(1, {2, 1});
  RandomOperations(1.7, {1, 3});
}

}  // namespace
}  // namespace sluice
