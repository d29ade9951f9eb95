// Tests of the prefix cache and of idle pages: by hand, and with random sequences against a model.
#include "src/kv/prefix_cache.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "src/base/rng.h"
#include "src/kv/sequence_cache.h"
#include "tests/unit/kv/kv_support.h"

namespace sluice {
namespace {

using Readers = PrefixCache::Readers;
constexpr int64_t kUnit = 8;  // blocks of 4 and of 8 tokens

std::vector<int32_t> Tokens(int64_t count, int32_t first = 0) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(first + static_cast<int32_t>(i));
  return tokens;
}

// Pages' first bytes say whose they are: the tenant and all tokens up to the page's last one.
uint64_t StampOf(const std::string& tenant, const std::vector<int32_t>& tokens, int64_t end,
                 size_t list) {
  uint64_t hash = 0xcbf29ce484222325u + list;
  for (const char c : tenant) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  for (int64_t i = 0; i < end; ++i) {
    hash = (hash ^ static_cast<uint32_t>(tokens[static_cast<size_t>(i)])) * 0x100000001b3u;
  }
  return hash;
}

struct World {
  explicit World(int64_t blocks = 1000, bool shared = false) {
    TierShape shape{TwoKinds()};
    shape.shared = shared;
    const size_t bytes =
        static_cast<size_t>(shape.layout.BytesFor(kUnit)) * static_cast<size_t>(blocks) +
        4096 * (shared ? 1 : 2) + 100;  // the pool aligns each part
    auto made = PagePool::Create(
        "dram", shape, Buffer(std::calloc(bytes, 1), bytes, [](void* p, size_t) { std::free(p); }));
    REQUIRE(made.ok());
    pool = *std::move(made);
    cache = PrefixCache::Create(pool.get());
  }

  std::unique_ptr<SequenceCache> Begin(const std::string& tenant,
                                       const std::vector<int32_t>& tokens) {
    return BeginBehindPrefix(*pool, *cache, tenant, tokens);
  }
  template <typename Visit>
  void ForEachPage(const SequenceCache& of, int64_t begin, int64_t end, Visit&& visit) const {
    const CacheLayout& layout = pool->layout();
    for (int layer = 0; layer < layout.layers; ++layer) {
      for (size_t kind = 0; kind < layout.kinds.size(); ++kind) {
        const int64_t block = layout.kinds[kind].block_tokens;
        for (int64_t b = begin / block; b < end / block; ++b) {
          visit(static_cast<size_t>(layer) * 2 + kind, (b + 1) * block,
                of.BlockAddress(layer, kind, 0, b));
        }
      }
    }
  }
  // Writes what is not shared.
  void Write(const std::string& tenant, const std::vector<int32_t>& tokens, SequenceCache& to) {
    ForEachPage(to, to.shared_tokens(), std::ssize(tokens),
                [&](size_t list, int64_t end, uint8_t* at) {
                  const uint64_t stamp = StampOf(tenant, tokens, end, list);
                  std::memcpy(at, &stamp, sizeof(stamp));
                });
  }
  bool Intact(const std::string& tenant, const std::vector<int32_t>& tokens, int64_t begin,
              int64_t end, const SequenceCache& of) const {
    bool intact = true;
    ForEachPage(of, begin, end, [&](size_t list, int64_t block_end, const uint8_t* at) {
      const uint64_t stamp = StampOf(tenant, tokens, block_end, list);
      intact = intact && std::memcmp(at, &stamp, sizeof(stamp)) == 0;
    });
    return intact;
  }
  void Run(const std::string& tenant, const std::vector<int32_t>& tokens) {
    auto sequence = Begin(tenant, tokens);
    REQUIRE(sequence != nullptr);
    Write(tenant, tokens, *sequence);
    cache->Publish(tenant, tokens, Readers::kNone, *sequence);
  }
  int64_t Known(const std::string& tenant, const std::vector<int32_t>& tokens) {
    return cache->Find(tenant, tokens).tokens();
  }
  bool NothingUsed() const {
    for (size_t kind = 0; kind < 2; ++kind) {
      if (pool->UsageOf(kind).used_bytes != 0 || pool->UsageOf(kind).reserved_bytes != 0) {
        return false;
      }
    }
    return true;
  }

  std::unique_ptr<PagePool> pool;
  std::shared_ptr<PrefixCache> cache;
};

}  // namespace

TEST_CASE("A prefix is found in whole units of every kind, and by its tenant alone") {
  World w;
  CHECK(w.cache->unit_tokens() == kUnit);
  CHECK(w.Known("a", Tokens(40)) == 0);
  w.Run("a", Tokens(29));
  CHECK(w.NothingUsed());
  CHECK(w.pool->UsageOf(0).idle_bytes > 0);
  CHECK(w.Known("a", Tokens(40)) == 24);
  CHECK(w.Known("a", Tokens(17)) == 16);
  CHECK(w.Known("a", Tokens(7)) == 0);
  CHECK(w.Known("a", Tokens(40, 1)) == 0);
  CHECK(w.Known("b", Tokens(40)) == 0);
  CHECK(w.Known("", Tokens(40)) == 0);
  std::vector<int32_t> other = Tokens(40);
  other[12] = -1;
  CHECK(w.Known("a", other) == 8);
  w.Run("a", other);
  CHECK(w.Known("a", other) == 40);
  CHECK(w.Known("a", Tokens(40)) == 24);
  CHECK(w.cache->Count().tokens == 24 + 32);
  CHECK(w.cache->Count().idle_tokens == 24 + 32);
}

TEST_CASE("Sequences share blocks by reference, and write none of them") {
  World w;
  const std::vector<int32_t> tokens = Tokens(40);
  w.Run("a", tokens);
  auto one = w.Begin("a", tokens), two = w.Begin("a", tokens);
  CHECK(one->shared_tokens() == 40);
  CHECK(one->Pages(1, 0) == two->Pages(1, 0));
  CHECK(w.pool->UsageOf(0).used_bytes == w.pool->layout().kinds[0].page_bytes() * 2 * 10);
  CHECK(w.Intact("a", tokens, 0, 40, *one));
  CHECK(one->Covers(40));
  CHECK(one->Lacks(48) == TokensByKind({8, 8}));
  REQUIRE(one->Extend(50));
  CHECK(one->Covers(50));
  one->EnsureTokens(50);
  CHECK(one->tokens() >= 50);
  CHECK(one->Pages(1, 0).size() > two->Pages(1, 0).size());
  one->ShrinkTo(3);  // shared blocks stay
  CHECK(one->tokens() == 40);
  SharedPrefix kept;
  const Reservation promise = SequenceCache::Dissolve(std::move(one), &kept);
  CHECK(kept.tokens() == 40);
  SequenceCache again(w.pool.get(), w.pool->TryReserve(0), std::move(kept));
  CHECK(again.Pages(1, 1) == two->Pages(1, 1));
}

TEST_CASE("Two sequences that computed the same blocks end up with one copy") {
  World w;
  const std::vector<int32_t> tokens = Tokens(32);
  auto one = w.Begin("a", tokens), two = w.Begin("a", tokens), three = w.Begin("a", tokens);
  for (auto* sequence : {one.get(), two.get(), three.get()}) w.Write("a", tokens, *sequence);
  w.cache->Publish("a", Tokens(24), Readers::kSome, *one);
  CHECK(one->shared_tokens() == 24);
  // Somebody reads the second, so its pages stay where they are; the third gives its own back.
  w.cache->Publish("a", tokens, Readers::kSome, *two);
  CHECK(two->shared_tokens() == 0);
  w.cache->Publish("a", tokens, Readers::kNone, *three);
  CHECK(three->shared_tokens() == 32);
  CHECK(std::equal(one->Pages(0, 0).begin(), one->Pages(0, 0).begin() + 6,
                   three->Pages(0, 0).begin()));
  for (auto* sequence : {one.get(), two.get(), three.get()}) {
    CHECK(w.Intact("a", tokens, 0, 32, *sequence));
  }
  CHECK(w.cache->Count().tokens == 32);
  // The first may still publish what follows, and now finds it known.
  w.cache->Publish("a", tokens, Readers::kNone, *one);
  CHECK(one->shared_tokens() == 32);
  one.reset(), two.reset(), three.reset();
  CHECK(w.NothingUsed());
}

TEST_CASE("Idle blocks go when a promise lacks room, those used longest ago first") {
  World w(10);
  w.Run("a", Tokens(32));        // 4 units
  w.Run("a", Tokens(32, 1000));  // 4 units
  CHECK(w.pool->HeadroomNow().firm_tokens.least() >= 80);
  CHECK(w.pool->HeadroomNow().free_tokens.least() >= 80);
  CHECK(w.Known("a", Tokens(32)) == 32);  // and so used last
  {
    const Reservation three = w.pool->TryReserve(24);
    CHECK_FALSE(three.empty());
    CHECK(w.Known("a", Tokens(32)) == 32);
    CHECK(w.Known("a", Tokens(32, 1000)) == 24);  // its last block is gone
    CHECK(w.cache->Count().evicted_tokens == 8);
  }
  // A promise that cannot be made drops nothing.
  CHECK(w.pool->TryReserve(100).empty());
  CHECK(w.Known("a", Tokens(32)) == 32);
  auto reader = w.Begin("a", Tokens(32));
  CHECK(w.pool->TryReserve(56).empty());
  const Reservation rest = w.pool->TryReserve(48);
  CHECK_FALSE(rest.empty());
  CHECK(w.Intact("a", Tokens(32), 0, 32, *reader));
  CHECK(w.Known("a", Tokens(32, 1000)) == 0);
}

TEST_CASE("A cache may outlive its owner in a sequence, and leaves an empty pool") {
  World w;
  w.Run("a", Tokens(32));
  auto sequence = w.Begin("a", Tokens(40));
  w.cache.reset();
  CHECK(sequence->shared_tokens() == 32);
  CHECK(w.Intact("a", Tokens(40), 0, 32, *sequence));
  sequence.reset();
  for (size_t kind = 0; kind < 2; ++kind) CHECK(w.pool->UsageOf(kind).idle_bytes == 0);
  CHECK(w.NothingUsed());
}

// Sequences come, publish, read on and go, in a pool that is too small for what they leave. What a
// sequence finds must be what one with the same tokens wrote, and nothing that is idle may ever
// stand in the way of a promise.
TEST_CASE("Random sequences read what they or their like wrote", "[property]") {
  const bool shared = GENERATE(false, true);
  const uint64_t seed = GENERATE(1u, 2u, 3u, 4u, 5u, 6u);
  INFO("shared arena " << shared << ", seed " << seed);
  SplitMix64 random(seed);
  World w(60, shared);
  struct Live {
    std::string tenant;
    std::vector<int32_t> tokens;
    std::unique_ptr<SequenceCache> cache;
    int64_t published = 0;
  };
  std::vector<Live> live;
  uint64_t hits = 0;
  for (int step = 0; step < 3000; ++step) {
    const uint64_t choice = random() % 8;
    if (choice < 3) {
      Live next;
      next.tenant = random() % 2 == 0 ? "a" : "b";
      const auto length = static_cast<int64_t>(1 + random() % 120);
      for (int64_t i = 0; i < length; ++i) {  // few branches, so that many prefixes are the same
        next.tokens.push_back(static_cast<int32_t>(random() % 16 == 0 ? random() % 2 : 7));
      }
      next.cache = w.Begin(next.tenant, next.tokens);
      int64_t used = 0;
      for (const Live& other : live) used += (std::ssize(other.tokens) + kUnit - 1) / kUnit;
      if (next.cache == nullptr) {
        // Even if nothing is shared there is room while the live ones leave it.
        if (!shared) CHECK(used + (length + kUnit - 1) / kUnit > 60);
        continue;
      }
      const int64_t found = next.cache->shared_tokens();
      hits += found > 0 ? 1 : 0;
      REQUIRE(w.Intact(next.tenant, next.tokens, 0, found, *next.cache));
      w.Write(next.tenant, next.tokens, *next.cache);
      live.push_back(std::move(next));
    } else if (choice < 6 && !live.empty()) {
      Live& one = live[random() % live.size()];
      const auto end = static_cast<int64_t>(random() % (one.tokens.size() + 1));
      const std::vector<int32_t> tokens(one.tokens.begin(), one.tokens.begin() + end);
      const bool reads = random() % 2 == 0;
      const int64_t before = one.cache->shared_tokens();
      w.cache->Publish(one.tenant, tokens, reads ? Readers::kSome : Readers::kNone, *one.cache);
      REQUIRE(one.cache->shared_tokens() >= before);
      if (!reads) REQUIRE(one.cache->shared_tokens() >= end / kUnit * kUnit);
      REQUIRE(w.Known(one.tenant, one.tokens) >= one.cache->shared_tokens());
    } else if (choice == 6 && !live.empty()) {
      const size_t at = random() % live.size();
      const Live& one = live[at];
      REQUIRE(w.Intact(one.tenant, one.tokens, 0, std::ssize(one.tokens), *one.cache));
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
    } else if (choice == 7 && random() % 16 == 0) {
      live.clear();
      REQUIRE(w.NothingUsed());
      const Reservation all = w.pool->TryReserve(w.pool->capacity_tokens() / (shared ? 3 : 1));
      REQUIRE_FALSE(all.empty());
    }
    for (const Live& one : live) {
      REQUIRE(w.Intact(one.tenant, one.tokens, 0, std::ssize(one.tokens), *one.cache));
    }
  }
  CHECK(hits > 100);
  CHECK(w.cache->Count().evicted_tokens > 0);
  live.clear();
  const PrefixCache::Statistics end = w.cache->Count();
  CHECK(end.tokens == end.idle_tokens);
}

}  // namespace sluice
