// Tests of an arena that kinds share: each kind has what the others leave, and every promise is
// kept.
#include <algorithm>
#include <map>
#include <numeric>

#include "src/base/rng.h"
#include "src/kv/page_pool.h"
#include "src/kv/sequence_cache.h"
#include "tests/test_main.h"
#include "tests/unit/kv/transfer_support.h"

namespace sluice {
namespace {

// Two kinds with pages of 576 and 160 bytes, which makes slabs of 2,880.
CacheLayout Layout() {
  CacheLayout layout = TwoKinds();
  layout.kinds[0].heads = layout.kinds[1].heads = 1;
  layout.kinds[0].block_tokens = layout.kinds[1].block_tokens = 4;
  layout.kinds[0].SetEqualParts(1, 144);
  layout.kinds[1].SetEqualParts(1, 40);
  return layout;
}

std::unique_ptr<PagePool> Make(size_t bytes) {
  TierShape shape{Layout()};
  shape.shared = true;
  auto pool = PagePool::Create(
      "dram", shape, Buffer(std::calloc(bytes, 1), bytes, [](void* p, size_t) { std::free(p); }));
  REQUIRE(pool.ok());
  return *std::move(pool);
}

std::unique_ptr<SequenceCache> Take(PagePool* pool, const TokensByKind& tokens) {
  Reservation room = pool->TryReserve(tokens);
  if (room.empty()) return nullptr;
  auto cache = std::make_unique<SequenceCache>(pool, std::move(room));
  cache->EnsureTokens(tokens);
  return cache;
}

TEST_CASE("a shared arena is wholly one kind's, then the other's") {
  const auto pool = Make(64 << 10);
  const TokensByKind all = pool->Capacity();
  CHECK(all[0] * 144 * pool->layout().layers > (64 << 10) * 9 / 10);
  CHECK(all[1] * 40 * pool->layout().layers > (64 << 10) * 9 / 10);
  CHECK_FALSE(pool->CouldEverFit(all));
  for (int round = 0; round < 3; ++round) {
    for (const TokensByKind& most : {TokensByKind({all[0], 0}), TokensByKind({0, all[1]})}) {
      std::unique_ptr<SequenceCache> cache = Take(pool.get(), most);
      REQUIRE(cache != nullptr);
      CHECK(pool->HeadroomNow().firm_tokens[0] == 0);
      CHECK(pool->HeadroomNow().firm_tokens[1] == 0);
      CHECK(pool->TryReserve({4, 0}).empty());
      CHECK(pool->TryReserve({0, 4}).empty());
    }
  }
}

TEST_CASE("what a kind gives back the other takes, while the first sequence lives") {
  const auto pool = Make(64 << 10);
  const int64_t half = pool->Capacity()[0] / 2;
  std::unique_ptr<SequenceCache> running = Take(pool.get(), {half, half});
  REQUIRE(running != nullptr);
  const int64_t before = pool->HeadroomNow().firm_tokens[0];
  running->ShrinkTo({half, 0});
  const int64_t after = pool->HeadroomNow().firm_tokens[0];
  // The kinds have 40 and 144 bytes a token.
  CHECK(after - before >= half * 40 / 144 - 40);
  CHECK(Take(pool.get(), {after, 0}) != nullptr);
}

TEST_CASE("so many sequences fit as can come in one after the other") {
  for (const size_t kib : {40, 64, 111}) {
    const auto pool = Make(kib << 10);
    const int64_t most = pool->Capacity()[0];
    CHECK(pool->SequencesThatFit({most, 0}) == 1);
    CHECK(pool->SequencesThatFit({most, 0}, {0, most}) == 0);
    for (const int64_t one : {most / 3, most / 9, most / 20}) {
      const int64_t fit = pool->SequencesThatFit({one, 0}, {0, one});
      CHECK(fit <= pool->SequencesThatFit({one, 0}));
      CHECK(fit >= pool->SequencesThatFit(one));
      std::vector<std::unique_ptr<SequenceCache>> running;
      while (true) {
        std::unique_ptr<SequenceCache> next = Take(pool.get(), one);
        if (next == nullptr) break;
        next->ShrinkTo({one, 0});
        running.push_back(std::move(next));
      }
      CHECK(std::ssize(running) == fit);
    }
  }
}

// A sequence with a promise finds its pages, whatever others have done meanwhile, and no byte has
// two owners, although the kinds' pages lie in the same memory.
TEST_CASE("whatever comes and goes, promises are kept and bytes have one owner") {
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    SplitMix64 random(seed);
    const auto pool = Make(size_t{20 + 12 * seed} << 10);
    const CacheLayout& layout = pool->layout();
    struct Alive {
      std::unique_ptr<SequenceCache> cache;
      TokensByKind promised, taken;
    };
    std::vector<Alive> alive;
    std::map<std::string, int> met;
    const auto some = [&](const TokensByKind& most) {
      TokensByKind tokens = 0;
      for (size_t kind = 0; kind < 2; ++kind) {
        tokens[kind] = static_cast<int64_t>(random.Below(static_cast<uint64_t>(most[kind]) + 1));
      }
      return tokens;
    };
    for (int round = 0; round < 1500; ++round) {
      const size_t what = random.Below(5);
      if (what < 2 || alive.empty()) {
        const TokensByKind tokens = some({90, 260});
        Reservation room = pool->TryReserve(tokens);
        ++met[room.empty() ? "refused" : "reserved"];
        if (!room.empty()) {
          alive.push_back(
              {std::make_unique<SequenceCache>(pool.get(), std::move(room)), tokens, 0});
        }
      } else {
        const size_t i = random.Below(alive.size());
        Alive& one = alive[i];
        if (what == 2) {
          TokensByKind tokens = some(one.promised);
          for (size_t kind = 0; kind < 2; ++kind) {
            tokens[kind] = std::max(tokens[kind], one.taken[kind]);
          }
          one.cache->EnsureTokens(tokens);  // crashes if a promise is not kept
          one.taken = tokens;
          ++met["grown"];
        } else if (what == 3) {
          one.promised = some(one.promised);
          one.cache->ShrinkTo(one.promised);
          one.taken = Least(one.taken, one.promised);
          ++met["shrunk"];
        } else {
          alive.erase(alive.begin() + static_cast<std::ptrdiff_t>(i));
          ++met["gone"];
        }
      }
      if (round % 50 == 49) {  // every sequence takes all that it was promised
        for (Alive& one : alive) {
          one.cache->EnsureTokens(one.promised);
          one.taken = one.promised;
        }
      }
      std::map<const uint8_t*, int64_t> owned;
      for (const Alive& one : alive) {
        for (int layer = 0; layer < layout.layers; ++layer) {
          for (size_t kind = 0; kind < 2; ++kind) {
            for (const int32_t page : one.cache->Pages(layer, kind)) {
              REQUIRE(owned.emplace(pool->PageAddress(kind, page), layout.kinds[kind].page_bytes())
                          .second);
            }
          }
        }
      }
      for (size_t kind = 0; kind < 2; ++kind) {
        const PagePool::Usage usage = pool->UsageOf(kind);
        REQUIRE(usage.used_bytes <= usage.reserved_bytes);
        REQUIRE(usage.reserved_bytes <= usage.capacity_bytes);
        // There is as much room as the pool says there is.
        TokensByKind room = 0;
        room[kind] = pool->HeadroomNow().firm_tokens[kind];
        REQUIRE_FALSE((room[kind] > 0 && pool->TryReserve(room).empty()));
      }
      const uint8_t* end = nullptr;
      for (const auto& [first, bytes] : owned) {
        REQUIRE(first >= end);
        end = first + bytes;
      }
    }
    for (const char* name : {"reserved", "refused", "grown", "shrunk", "gone"}) {
      CHECK(met[name] > 0);
    }
    alive.clear();
    for (size_t kind = 0; kind < 2; ++kind) {
      CHECK(pool->HeadroomNow().firm_tokens[kind] == pool->Capacity()[kind]);
      CHECK(pool->UsageOf(kind).reserved_bytes == 0);
    }
  }
}

}  // namespace
}  // namespace sluice
