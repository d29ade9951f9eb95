// Tests what the prefix caches of one rank or of several tell an observer: by hand, and against
// what Find says while random sequences publish, prove, forget and drop blocks.
#include "src/kv/prefix_events.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "src/base/rng.h"
#include "src/kv/prefix_cache.h"
#include "src/kv/prefix_union.h"
#include "src/kv/sequence_cache.h"
#include "tests/unit/kv/kv_support.h"

namespace sluice {
namespace {

using Readers = PrefixCache::Readers;
constexpr int64_t kUnit = 8;  // blocks of 4 and of 8 tokens

// A router: it believes what it is told, and checks that it makes sense.
class Router final : public PrefixObserver {
 public:
  void OnStored(std::optional<uint64_t> parent, absl::Span<const int32_t> tokens,
                absl::Span<const uint64_t> hashes) override {
    REQUIRE(tokens.size() == hashes.size() * kUnit);
    for (const uint64_t hash : hashes) {
      if (parent.has_value()) CHECK(known.contains(*parent));
      CHECK(known.emplace(hash, parent).second);
      parent = hash;
    }
    ++stored;
  }
  void OnRemoved(absl::Span<const uint64_t> hashes) override {
    CHECK(!hashes.empty());
    for (const uint64_t hash : hashes) CHECK(known.erase(hash) == 1);
    ++removed;
  }

  std::map<uint64_t, std::optional<uint64_t>> known;  // with their parents
  int stored = 0, removed = 0;
};

// A node whose ranks have a cache each.
struct World {
  explicit World(int64_t units, size_t ranks = 1) {
    const CacheLayout layout = TwoKinds();
    std::vector<PrefixCache*> all;
    for (size_t rank = 0; rank < ranks; ++rank) {
      pools.push_back(
          MakePool("dram", layout, static_cast<size_t>(layout.BytesFor(kUnit) * units) + 8292));
      caches.push_back(PrefixCache::Create(pools.back().get()));
      all.push_back(caches.back().get());
    }
    cache = all.front();
    shown = std::make_unique<PrefixUnion>(std::move(all), &router, "model");
  }

  std::unique_ptr<SequenceCache> Begin(const std::string& tenant,
                                       const std::vector<int32_t>& tokens, size_t rank = 0) {
    return BeginBehindPrefix(*pools[rank], *caches[rank], tenant, tokens);
  }
  void Run(const std::string& tenant, const std::vector<int32_t>& tokens, size_t rank = 0) {
    auto sequence = Begin(tenant, tokens, rank);
    REQUIRE(sequence != nullptr);
    caches[rank]->Publish(tenant, tokens, Readers::kNone, *sequence);
  }
  // Checks that the router knows the prompt's blocks just as far as a sequence of some rank finds
  // them.
  void CheckKnown(const std::string& tenant, const std::vector<int32_t>& tokens) {
    int64_t units = 0;
    for (const auto& one : caches) {
      units = std::max(units, one->Find(tenant, tokens).tokens() / kUnit);
    }
    const std::vector<uint64_t> hashes = HashesOf(tenant, tokens);
    int64_t known = 0;
    for (const uint64_t hash : hashes) known += router.known.contains(hash) ? 1 : 0;
    CHECK(known == units);
  }
  // Checks that a router that comes late is told what one knows that missed nothing.
  void CheckAnnounced() {
    Router late;
    bool first = false;
    shown->AnnounceAll([&] { first = late.known.empty(); },
                       [&](auto... arguments) { late.OnStored(arguments...); });
    CHECK(first);
    CHECK(late.known == router.known);
  }
  static std::vector<uint64_t> HashesOf(const std::string& tenant, std::vector<int32_t> tokens) {
    tokens.resize(tokens.size() / kUnit * kUnit);
    return PrefixHashes(PrefixSeed("model", tenant), tokens, kUnit);
  }

  Router router;
  std::vector<std::unique_ptr<PagePool>> pools;
  std::vector<std::shared_ptr<PrefixCache>> caches;
  PrefixCache* cache = nullptr;  // the first one
  std::unique_ptr<PrefixUnion> shown;
};

std::vector<int32_t> Tokens(int64_t count, int32_t first = 0) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(first + static_cast<int32_t>(i));
  return tokens;
}

}  // namespace

TEST_CASE("An observer is told of blocks with their tokens, parents and hashes") {
  World w(100);
  w.Run("alice", Tokens(20));
  const std::vector<uint64_t> hashes = World::HashesOf("alice", Tokens(40));
  using Known = std::map<uint64_t, std::optional<uint64_t>>;
  CHECK(w.router.known == Known{{hashes[0], std::nullopt}, {hashes[1], hashes[0]}});
  w.Run("alice", Tokens(40));
  CHECK(w.router.known.size() == 5);
  CHECK(w.router.known.at(hashes[4]) == hashes[3]);
  CHECK(w.router.known.at(hashes[2]) == hashes[1]);
  w.Run("alice", Tokens(40));  // it leaves nothing new
  CHECK(w.router.stored == 2);
  w.Run("bob", Tokens(40));
  CHECK(w.router.known.size() == 10);  // other names for the same tokens
  CHECK(w.router.removed == 0);
}

TEST_CASE("The names of blocks do not change between builds and tell models and tenants apart") {
  const std::vector<int32_t> tokens = Tokens(8);
  const uint64_t hash = PrefixHashes(PrefixSeed("model", "alice"), tokens, 8)[0];
  CHECK(hash == PrefixHashes(PrefixSeed("model", "alice"), tokens, 4)[1]);
  CHECK(hash != PrefixHashes(PrefixSeed("model", "bob"), tokens, 8)[0]);
  CHECK(PrefixSeed("model", "alice") != PrefixSeed("modela", "lice"));
  CHECK(PrefixHashes(1, std::vector<int32_t>{2}, 1)[0] == SplitMix64(3)());
}

TEST_CASE("An observer is told of unproven blocks when they are proven, and of forgotten ones") {
  World w(100);
  auto sequence = w.Begin("a", Tokens(32));
  w.cache->Publish("a", Tokens(16), Readers::kSome, *sequence, 7);
  w.cache->Publish("a", Tokens(32), Readers::kSome, *sequence);  // behind what is not proven
  CHECK(w.router.known.empty());
  w.cache->Prove("a", Tokens(16), 7);
  CHECK(w.router.known.size() == 4);
  w.Run("a", Tokens(48));
  w.cache->Forget("a", Tokens(9));
  CHECK(w.router.known.empty());
  // Nobody finds blocks that it publishes behind forgotten ones.
  auto later = w.Begin("a", Tokens(24));
  sequence->EnsureTokens(32);
  w.cache->Publish("a", Tokens(24), Readers::kNone, *later);
  CHECK(w.router.known.size() == 3);
}

TEST_CASE("A proof of a few tokens reads no more of them where another has a longer run") {
  World w(100);
  w.Run("a", Tokens(48));
  auto sequence = w.Begin("a", Tokens(16));
  const std::vector<int32_t> few = Tokens(16);  // a read behind them is AddressSanitizer's to see
  w.cache->Publish("a", few, Readers::kSome, *sequence, 5);
  w.cache->Prove("a", few, 5);
  CHECK(w.router.known.size() == 6);
  w.CheckKnown("a", Tokens(48));
}

TEST_CASE("All that a cache has is told anew, as a router that missed nothing knows it") {
  World w(100);
  w.Run("a", Tokens(64));
  w.Run("a", Tokens(24, 100));
  std::vector<int32_t> fork = Tokens(16);
  fork.resize(40, 9);
  w.Run("a", fork);
  w.Run("b", fork);
  auto unproven = w.Begin("a", Tokens(8, 200));
  w.cache->Publish("a", Tokens(8, 200), Readers::kSome, *unproven, 3);
  w.CheckAnnounced();
}

TEST_CASE("Blocks of several ranks are stored once, and removed with the last") {
  World w(100, 3);
  w.Run("a", Tokens(24), 1);
  w.Run("a", Tokens(40), 2);
  CHECK(w.router.stored == 2);
  const std::vector<uint64_t> hashes = World::HashesOf("a", Tokens(40));
  CHECK(w.router.known.size() == 5);
  CHECK(w.router.known.at(hashes[3]) == hashes[2]);
  w.Run("a", Tokens(40), 0);
  CHECK(w.router.stored == 2);
  w.CheckAnnounced();
  w.caches[0]->Forget("a", Tokens(40));
  w.caches[2]->Forget("a", Tokens(40));
  CHECK(w.router.known.size() == 3);
  w.CheckAnnounced();
  w.caches[1]->Forget("a", Tokens(40));
  CHECK(w.router.known.empty());
}

// Catch2's checks are of one thread.
class Counter final : public PrefixObserver {
 public:
  void OnStored(std::optional<uint64_t>, absl::Span<const int32_t>,
                absl::Span<const uint64_t> hashes) override {
    for (const uint64_t hash : hashes) wrong += known.insert(hash).second ? 0 : 1;
  }
  void OnRemoved(absl::Span<const uint64_t> hashes) override {
    for (const uint64_t hash : hashes) wrong += known.erase(hash) == 1 ? 0 : 1;
  }
  std::set<uint64_t> known;
  int wrong = 0;
};

TEST_CASE("Ranks that publish and forget at once leave what they have") {
  const CacheLayout layout = TwoKinds();
  std::vector<std::unique_ptr<PagePool>> pools;
  std::vector<std::shared_ptr<PrefixCache>> caches;
  for (int rank = 0; rank < 2; ++rank) {
    pools.push_back(
        MakePool("dram", layout, static_cast<size_t>(layout.BytesFor(kUnit) * 400) + 8192));
    caches.push_back(PrefixCache::Create(pools.back().get()));
  }
  Counter counter;
  PrefixUnion shown({caches[0].get(), caches[1].get()}, &counter, "model");
  const auto work = [&](size_t rank) {
    SplitMix64 random(rank);
    for (int step = 0; step < 300; ++step) {
      const std::vector<int32_t> tokens = Tokens(int64_t(random() % 12) * kUnit, 7);
      SharedPrefix prefix = caches[rank]->Find("a", tokens);
      Reservation rest = pools[rank]->TryReserve(std::ssize(tokens) - prefix.tokens());
      if (!rest.empty()) {
        SequenceCache made(pools[rank].get(), std::move(rest), std::move(prefix));
        made.EnsureTokens(std::ssize(tokens));
        caches[rank]->Publish("a", tokens, Readers::kNone, made);
      }
      if (random() % 3 == 0) caches[rank]->Forget("a", tokens);
    }
  };
  std::thread other(work, 1);
  const auto count = [&] {
    size_t known = 0;
    shown.AnnounceAll([] {}, [&](std::optional<uint64_t>, absl::Span<const int32_t>,
                                 absl::Span<const uint64_t> hashes) { known += hashes.size(); });
    return known;
  };
  for (int i = 0; i < 100; ++i) CHECK(count() <= 11);
  work(0);
  other.join();
  CHECK(counter.wrong == 0);
  CHECK(count() == counter.known.size());
  const std::vector<int32_t> all = Tokens(11 * kUnit, 7);
  const int64_t found =
      std::max(caches[0]->Find("a", all).tokens(), caches[1]->Find("a", all).tokens());
  CHECK(std::ssize(counter.known) == found / kUnit);
}

TEST_CASE("A router knows at all times what sequences find") {
  const uint64_t seed = GENERATE(range(1, 41));
  SplitMix64 random(seed);
  const size_t ranks = 1 + seed % 3;
  World w(60, ranks);
  std::vector<std::pair<std::string, std::vector<int32_t>>> prompts;
  struct Running {
    size_t prompt = 0;
    size_t rank = 0;
    uint64_t proof = 0;
    std::unique_ptr<SequenceCache> cache;
  };
  std::vector<Running> running;
  for (uint64_t step = 1; step <= 200; ++step) {
    if (prompts.size() < 3 || random() % 4 == 0) {
      std::vector<int32_t> tokens;
      if (!prompts.empty()) {
        tokens = prompts[random() % prompts.size()].second;
        tokens.resize(random() % (tokens.size() + 1));
      }
      while (tokens.size() < 90 && random() % 30 != 0) {
        tokens.push_back(static_cast<int32_t>(random() % 2));
      }
      prompts.emplace_back(random() % 2 == 0 ? "a" : "b", std::move(tokens));
    }
    const size_t prompt = random() % prompts.size();
    const auto& [tenant, tokens] = prompts[prompt];
    const uint64_t proof = random() % 2 == 0 ? step : 0;
    const size_t rank = random() % ranks;
    if (auto made = w.Begin(tenant, tokens, rank); made != nullptr) {
      const size_t part = random() % (tokens.size() + 1);
      w.caches[rank]->Publish(tenant, absl::MakeSpan(tokens).first(part),
                              random() % 2 == 0 ? Readers::kSome : Readers::kNone, *made, proof);
      running.push_back({prompt, rank, proof, std::move(made)});
    }
    while (!running.empty() && (running.size() > 3 || random() % 2 == 0)) {
      const size_t at = random() % running.size();
      const auto& [of, ends] = prompts[running[at].prompt];
      PrefixCache& cache = *w.caches[running[at].rank];
      if (running[at].proof != 0 && random() % 4 != 0) cache.Prove(of, ends, running[at].proof);
      if (random() % 4 == 0) cache.Publish(of, ends, Readers::kNone, *running[at].cache);
      if (random() % 16 == 0) cache.Forget(of, ends);
      running.erase(running.begin() + static_cast<ptrdiff_t>(at));
    }
    for (const auto& [of, all] : prompts) w.CheckKnown(of, all);
  }
  running.clear();
  CHECK(w.router.removed > 0);
}

}  // namespace sluice
