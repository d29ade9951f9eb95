#include "src/kv/page_pool.h"

#include <set>

#include "src/base/rng.h"
#include "src/kv/sequence_cache.h"
#include "tests/test_main.h"
#include "tests/unit/kv/kv_support.h"

namespace sluice {
namespace {

TEST_CASE("a pool that cannot hold one block of every layer is refused with what it takes") {
  const CacheLayout layout = TwoKinds();
  auto pool = PagePool::Create("hbm", layout,
                               Buffer(std::malloc(64), 64, [](void* p, size_t) { std::free(p); }));
  REQUIRE(absl::IsInvalidArgument(pool.status()));
  CHECK(std::string(pool.status().message()).find("hbm_bytes") != std::string::npos);
}

TEST_CASE("reservations never promise more than there is, and come back") {
  const auto pool = MakePool("dram", TwoKinds(), 64 << 10);
  const int64_t most = pool->capacity_tokens();
  CHECK(pool->CouldEverFit(most));
  CHECK_FALSE(pool->CouldEverFit(most * 2));
  Reservation all = pool->TryReserve(most);
  REQUIRE_FALSE(all.empty());
  CHECK(pool->TryReserve(most).empty());
  Reservation moved = std::move(all);
  CHECK(pool->UsageOf(0).reserved_bytes > 0);
  moved.Reset();
  CHECK(pool->UsageOf(0).reserved_bytes == 0);
  CHECK_FALSE(pool->TryReserve(most).empty());
}

TEST_CASE("a layer's pages are contiguous where the pool is not fragmented") {
  const auto pool = MakePool("dram", TwoKinds(), 256 << 10);
  SequenceCache cache(pool.get(), pool->TryReserve(40));
  cache.EnsureTokens(40);
  for (int layer = 0; layer < 2; ++layer) {
    for (size_t kind = 0; kind < 2; ++kind) {
      const std::vector<int32_t>& pages = cache.Pages(layer, kind);
      for (size_t i = 1; i < pages.size(); ++i) CHECK(pages[i] == pages[i - 1] + 1);
    }
  }
}

TEST_CASE("a sequence grows inside its reservation, to the last token") {
  const auto pool = MakePool("hbm", TwoKinds(), 256 << 10);
  SequenceCache cache(pool.get(), pool->TryReserve(333));
  for (int64_t tokens = 1; tokens <= 333; ++tokens) {
    cache.EnsureTokens(tokens);
    REQUIRE(cache.tokens() >= tokens);
  }
  for (size_t kind = 0; kind < 2; ++kind) {
    CHECK(pool->UsageOf(kind).used_bytes == pool->UsageOf(kind).reserved_bytes);
  }
}

TEST_CASE("whatever comes and goes, no page has two owners and everything comes back") {
  SplitMix64 random(TestSeed());
  const CacheLayout layout = TwoKinds();
  const auto pool = MakePool("hbm", layout, 128 << 10);
  std::vector<std::unique_ptr<SequenceCache>> alive;
  for (int round = 0; round < 3000; ++round) {
    if (random.Below(2) == 0) {
      const auto tokens = static_cast<int64_t>(1 + random.Below(300));
      Reservation reservation = pool->TryReserve(tokens);
      if (reservation.empty()) continue;
      auto cache = std::make_unique<SequenceCache>(pool.get(), std::move(reservation));
      cache->EnsureTokens(static_cast<int64_t>(1 + random.Below(static_cast<uint64_t>(tokens))));
      cache->EnsureTokens(tokens);
      alive.push_back(std::move(cache));
    } else if (!alive.empty()) {
      alive.erase(alive.begin() + static_cast<int64_t>(random.Below(alive.size())));
    }
    for (size_t kind = 0; kind < 2; ++kind) {
      std::set<int32_t> owned;
      for (const auto& cache : alive) {
        for (int layer = 0; layer < layout.layers; ++layer) {
          for (const int32_t page : cache->Pages(layer, kind)) REQUIRE(owned.insert(page).second);
        }
      }
      const PagePool::Usage usage = pool->UsageOf(kind);
      REQUIRE(usage.used_bytes ==
              static_cast<int64_t>(owned.size()) * layout.kinds[kind].page_bytes());
      REQUIRE(usage.used_bytes <= usage.reserved_bytes);
      REQUIRE(usage.reserved_bytes <= usage.capacity_bytes);
    }
  }
  alive.clear();
  for (size_t kind = 0; kind < 2; ++kind) {
    CHECK(pool->UsageOf(kind).used_bytes == 0);
    CHECK(pool->UsageOf(kind).reserved_bytes == 0);
  }
  // One run again: the neighbours were joined.
  Reservation whole = pool->TryReserve(pool->capacity_tokens());
  std::vector<int32_t> pages;
  REQUIRE(pool->TryTake(whole, {{0, whole.left(0), &pages}}));
  for (size_t i = 1; i < pages.size(); ++i) REQUIRE(pages[i] == pages[i - 1] + 1);
  pool->Give(whole, 0, pages);
}

TEST_CASE("an overcommitted pool promises more than it has, and gives no page twice") {
  const CacheLayout layout = TwoKinds();
  const auto pool = MakePool("hbm", layout, 64 << 10, 2.0);
  const int64_t most = pool->capacity_tokens();
  CHECK_FALSE(pool->CouldEverFit(2 * most));
  SequenceCache firm(pool.get(), pool->TryReserve(most));
  CHECK(pool->TryReserve(most, Promise::kFirm).empty());
  auto soft = std::make_unique<SequenceCache>(pool.get(), pool->TryReserve(most, Promise::kSoft));
  CHECK(pool->TryReserve(most, Promise::kSoft).empty());
  CHECK(pool->HeadroomNow().firm_tokens.least() == 0);
  CHECK(pool->HeadroomNow().soft_tokens.least() < most / 4);
  CHECK(pool->UsageOf(0).reserved_bytes > pool->UsageOf(0).capacity_bytes);

  using Growth = SequenceCache::Growth;
  CHECK(soft->EnsureTokens(most / 2) == Growth::kAdded);
  const int64_t before = pool->UsageOf(0).used_bytes;
  CHECK(firm.EnsureTokens(most) == Growth::kNoRoom);
  CHECK(pool->UsageOf(0).used_bytes == before);
  CHECK(firm.tokens() == 0);
  CHECK_FALSE(soft->MakeFirm());
  // Once the soft one is out of the way, the firm one finds all of its pages.
  SharedPrefix none;
  Reservation promise = SequenceCache::Dissolve(std::move(soft), &none);
  CHECK(firm.EnsureTokens(most) == Growth::kAdded);
  CHECK(pool->HeadroomNow().free_tokens.least() == 0);
  CHECK(pool->UsageOf(0).used_bytes <= pool->UsageOf(0).capacity_bytes);
}

TEST_CASE("a soft promise becomes firm when the firm ones have left") {
  const auto pool = MakePool("hbm", TwoKinds(), 64 << 10, 1.5);
  const int64_t most = pool->capacity_tokens();
  auto first = std::make_unique<SequenceCache>(pool.get(), pool->TryReserve(most));
  SequenceCache second(pool.get(), pool->TryReserve(most / 3, Promise::kSoft));
  CHECK_FALSE(second.firm());
  CHECK_FALSE(second.MakeFirm());
  first.reset();
  CHECK(second.MakeFirm());
  CHECK(second.firm());
  // It counts as firm from now on.
  CHECK(pool->TryReserve(most).empty());
}

}  // namespace
}  // namespace sluice
