// Pages of a divided model: the pools of other ranks have rank 0's pages, and chunks land where
// each rank has its heads.
#include <cstdlib>
#include <cstring>

#include "src/kv/chunk_landing.h"
#include "src/kv/sequence_cache.h"
#include "tests/test_main.h"
#include "tests/unit/kv/transfer_support.h"

namespace sluice {
namespace {

TEST_CASE("a pool that follows rank 0's has the same pages, whoever else has them") {
  const auto leads = MakePool("dram", TwoKinds(), 64 << 10);
  const auto follows = MakePool("dram", TwoKinds(), 64 << 10);
  follows->FollowRankZero();
  CHECK(follows->follows());
  // Rank 0's pool has holes, and another's pages in front.
  auto first = std::make_unique<SequenceCache>(leads.get(), leads->TryReserve(24));
  first->EnsureTokens(24);
  SequenceCache second(leads.get(), leads->TryReserve(40));
  second.EnsureTokens(9);
  first.reset();
  second.EnsureTokens(33);
  const auto same = [](const SequenceCache& a, const SequenceCache& b) {
    for (int layer = 0; layer < 2; ++layer) {
      for (size_t kind = 0; kind < 2; ++kind) {
        if (a.Pages(layer, kind) != b.Pages(layer, kind)) return false;
      }
    }
    return true;
  };
  {
    const auto copy = SequenceCache::OfRankZero(follows.get(), second.Describe());
    CHECK(same(*copy, second));
    CHECK(copy->Covers(40));
    CHECK(copy->Lacks(41) != TokensByKind(0));
    // Two sequences may have one page, as where they share a prefix.
    HomePages shared = second.Describe();
    shared.shared_tokens = 8;
    const auto other = SequenceCache::OfRankZero(follows.get(), shared);
    CHECK(other->shared_tokens() == 8);
    CHECK(same(*other, second));
    // A cache takes later what was chosen for it.
    SequenceCache later(follows.get(), follows->TryReserve(33));
    follows->ChoosePages(second.Describe().pages);
    later.EnsureTokens(33);
    const std::vector<int32_t>& all = second.Pages(1, 0);
    CHECK(later.Pages(1, 0) == std::vector<int32_t>(all.begin(), all.begin() + 9));
  }
  CHECK(follows->UsageOf(0).reserved_bytes == 0);
  CHECK(follows->UsageOf(0).used_bytes == 0);
}

TEST_CASE("a pool whose kinds share its arena follows too") {
  const auto make = [] {
    TierShape shape{TwoKinds()};
    shape.shared = true;
    constexpr size_t kBytes = 64 << 10;
    auto pool = PagePool::Create(
        "dram", shape,
        Buffer(std::calloc(kBytes, 1), kBytes, [](void* p, size_t) { std::free(p); }));
    REQUIRE(pool.ok());
    return *std::move(pool);
  };
  const auto leads = make(), follows = make();
  follows->FollowRankZero();
  auto first = std::make_unique<SequenceCache>(leads.get(), leads->TryReserve({24, 8}));
  first->EnsureTokens({24, 8});
  SequenceCache second(leads.get(), leads->TryReserve({40, 33}));
  second.EnsureTokens({9, 33});
  first.reset();
  {
    const auto copy = SequenceCache::OfRankZero(follows.get(), second.Describe());
    for (int layer = 0; layer < 2; ++layer) {
      for (size_t kind = 0; kind < 2; ++kind) {
        CHECK(copy->Pages(layer, kind) == second.Pages(layer, kind));
        CHECK(follows->PageAddress(kind, copy->Pages(layer, kind)[0]) - follows->base(0) ==
              leads->PageAddress(kind, second.Pages(layer, kind)[0]) - leads->base(0));
      }
    }
    // Pages that go back here stay rank 0's, which may have given it to another.
    copy->ShrinkTo({40, 0});
    second.ShrinkTo({40, 0});
    CHECK(follows->UsageOf(0).used_bytes == leads->UsageOf(0).used_bytes);
    CHECK(follows->UsageOf(1).used_bytes == 0);
    // A cache takes later what rank 0's took.
    second.Extend({40, 20});
    second.EnsureTokens({9, 20});
    REQUIRE(copy->Extend({40, 20}));
    follows->ChoosePages(second.Describe().pages);
    copy->EnsureTokens({9, 20});
    CHECK(copy->Pages(1, 1) == second.Pages(1, 1));
  }
  CHECK(follows->UsageOf(0).reserved_bytes == 0);
}

// Returns a rank's layout: it has one of the model's two heads.
CacheLayout OneHead() {
  CacheKind kv;
  kv.name = "kv";
  kv.heads = 1;
  kv.block_tokens = 4;
  kv.SetEqualParts(2, 16);
  return {2, {kv}};
}

// Stands for ranks on other hosts: writes arrive when they are finished, or not at all.
class FakeFar : public FarHeads {
 public:
  explicit FakeFar(const std::vector<std::unique_ptr<PagePool>>* ranks) : ranks_(*ranks) {}
  std::unique_ptr<FarWrites> Begin() override { return std::make_unique<Writes>(this); }
  bool lost = false;
  int open = 0;  // that have not ended

 private:
  struct Write {
    uint8_t* to;
    std::vector<uint8_t> bytes;
    bool compare;
  };
  class Writes : public FarWrites {
   public:
    explicit Writes(FakeFar* far) : far_(*far) { ++far_.open; }
    ~Writes() override { --far_.open; }
    void Write(int rank, size_t kind, uint64_t offset, absl::Span<const uint8_t> bytes,
               bool compare) override {
      SLUICE_CHECK(rank > 0 && offset + bytes.size() <= far_.ranks_[0]->kind_bytes(kind));
      all_.push_back({far_.ranks_[static_cast<size_t>(rank)]->base(kind) + offset,
                      std::vector<uint8_t>(bytes.begin(), bytes.end()), compare});
    }
    absl::StatusOr<bool> Finish() override {
      if (far_.lost) return absl::UnavailableError("rank 2 is lost");
      bool differs = false;
      for (const auto& [to, bytes, compare] : all_) {
        if (compare) differs = differs || std::memcmp(to, bytes.data(), bytes.size()) != 0;
        if (!compare) std::memcpy(to, bytes.data(), bytes.size());
      }
      return differs;
    }

   private:
    FakeFar& far_;
    std::vector<FakeFar::Write> all_;
  };
  const std::vector<std::unique_ptr<PagePool>>& ranks_;
};

// How a payload comes to the ranks: by Append where this process sees their memory or does not, or
// to the chunk's targets, as a link writes it.
enum class Way { kHere, kFar, kTargets };

void LandOnRanks(Way way) {
  const bool far_away = way == Way::kFar;
  // Three ranks: the first head is on rank 0, the second on ranks 1 and 2.
  std::vector<std::unique_ptr<PagePool>> ranks;
  for (int rank = 0; rank < 3; ++rank) ranks.push_back(MakePool("dram", OneHead(), 64 << 10));
  const auto distance = [&](size_t rank) { return ranks[rank]->base(0) - ranks[0]->base(0); };
  FakeFar far(&ranks);
  HeadPlaces places;
  places.layout = OneHead();
  places.layout.kinds[0].heads = 2;
  places.places = {{{0, {0}}, {0, {distance(1), distance(2)}}}};
  if (far_away) {
    places.places = {{{0, {0}}, {0, {}, {1, 2}}}};
    places.far = &far;
  }
  const auto hbm = MakePool("hbm", OneHead(), 64 << 10);
  ManualClock clock;
  TransferTable::Options options;
  options.model_fingerprint = "f00d";
  options.vocab_size = 100;
  options.max_context = 1000;
  options.footprint = [](int64_t context, int64_t total) { return Footprint{context, total}; };
  options.places = {places};
  int waits = 0;
  options.await_free_pages = [&] {
    ++waits;
    return absl::OkStatus();
  };
  TransferTable table(options, ranks[0].get(), hbm.get(), &clock);
  CHECK(table.layout().kinds[0].heads == 2);

  Manifest manifest;
  manifest.model_fingerprint = "f00d";
  manifest.cache_kinds = places.layout.kinds;
  manifest.context_length = 6;  // a block and a half
  manifest.prompt_token_ids.assign(6, 5);
  manifest.max_new_tokens = 4;
  const auto reserved = table.Reserve(manifest);
  REQUIRE(reserved.ok());
  CHECK(waits == 1);
  const auto land = [&](uint32_t layer, uint32_t heads, uint8_t add) {
    // Each byte says which head of which token of which layer it is of.
    std::vector<uint8_t> payload;
    for (uint32_t begin = 0; begin < 6; begin += 4) {
      for (uint32_t head = 2 - heads; head < 2; ++head) {
        for (int part = 0; part < 2; ++part) {
          for (uint32_t token = begin; token < std::min(begin + 4, 6u); ++token) {
            payload.insert(payload.end(), 8, uint8_t(layer * 100 + head * 50 + token + add));
          }
        }
      }
    }
    const ChunkHeader header{reserved->transfer_id, layer, "kv", 2 - heads, 2, 0, 6,
                             Crc32c(payload)};
    auto landing = table.BeginChunk(header, payload.size());
    if (!landing.ok()) return landing.status();
    if (way != Way::kTargets) {
      (*landing)->Append(payload);
      return (*landing)->Finish().status();
    }
    const uint8_t* from = payload.data();
    for (const ChunkLanding::Target& target : (*landing)->Targets()) {
      if (target.data != nullptr) std::memcpy(target.data, from, target.bytes);
      from += target.bytes;
    }
    CHECK(from == payload.data() + payload.size());
    (*landing)->Received(header.crc32c);
    return (*landing)->Finish().status();
  };
  REQUIRE(land(0, 2, 0).ok());
  REQUIRE(land(1, 1, 0).ok());  // the second head alone
  CHECK(table.BlocksMissing(reserved->transfer_id) == 2);
  if (far_away) {  // blocks count when they have arrived
    far.lost = true;
    CHECK(absl::IsUnavailable(land(1, 2, 0)));
    CHECK(table.BlocksMissing(reserved->transfer_id) == 2);
    far.lost = false;
  }
  REQUIRE(land(1, 2, 0).ok());
  CHECK(far.open == 0);
  REQUIRE(table.Commit(reserved->transfer_id, {}, nullptr).ok());
  HandoffRef ref;
  ref.transfer_id = reserved->transfer_id;
  const auto attached = table.Attach(ref);
  REQUIRE(attached.ok());
  auto ready = table.TakeReady(*attached);
  REQUIRE((ready.ok() && ready->has_value()));
  const SequenceCache& home = *(*ready)->home;
  for (int layer = 0; layer < 2; ++layer) {
    for (const auto& [rank, head] : {std::pair{0, 0}, {1, 1}, {2, 1}}) {
      for (int token = 0; token < 6; ++token) {
        const int32_t page = home.Pages(layer, 0)[static_cast<size_t>(token / 4)];
        const uint8_t* const block = ranks[static_cast<size_t>(rank)]->PageAddress(0, page);
        const int want = layer * 100 + head * 50 + token;
        CHECK(int{block[token % 4 * 8]} == want);
        CHECK(int{block[4 * 8 + token % 4 * 8 + 7]} == want);
      }
    }
  }
  // Other bytes for a block that has landed poison its transfer, wherever its head is.
  const auto again = table.Reserve(manifest);
  REQUIRE(again.ok());
  const auto poison = [&](uint8_t with) {
    std::vector<uint8_t> payload(6 * 16, with);
    const ChunkHeader header{again->transfer_id, 0, "kv", 1, 2, 0, 6, Crc32c(payload)};
    auto landing = table.BeginChunk(header, payload.size());
    if (!landing.ok()) return landing.status();
    (*landing)->Append(payload);
    return (*landing)->Finish().status();
  };
  CHECK(poison(1).ok());
  CHECK(poison(1).ok());
  CHECK(absl::IsFailedPrecondition(poison(2)));
}

// A rank on another host takes the payload of its own heads itself.
TEST_CASE("a rank learns where the bytes of its own heads go") {
  std::vector<std::unique_ptr<PagePool>> ranks;
  for (int rank = 0; rank < 3; ++rank) ranks.push_back(MakePool("dram", OneHead(), 64 << 10));
  FakeFar far(&ranks);
  HeadPlaces places;
  places.layout = OneHead();
  places.layout.kinds[0].heads = 4;
  // Rank 0 has the first head, rank 1 the second, both 1 and 2 the third, and 2 the last.
  places.places = {{{0, {0}}, {0, {}, {1}}, {0, {}, {1, 2}}, {0, {}, {2}}}};
  places.far = &far;
  const std::vector<RankHeads> own = places.OfOneRank();
  REQUIRE(own.size() == 2);
  CHECK((own[0].rank == 1 && own[0].begin == 1 && own[0].end == 2));
  CHECK((own[1].rank == 2 && own[1].begin == 3 && own[1].end == 4));
  const auto hbm = MakePool("hbm", OneHead(), 64 << 10);
  ManualClock clock;
  TransferTable::Options options;
  options.model_fingerprint = "f00d";
  options.vocab_size = 100;
  options.max_context = 1000;
  options.footprint = [](int64_t context, int64_t total) { return Footprint{context, total}; };
  options.places = {places};
  options.prefix_cache = false;
  TransferTable table(options, ranks[0].get(), hbm.get(), &clock);
  Manifest manifest;
  manifest.model_fingerprint = "f00d";
  manifest.context_length = 6;
  manifest.prompt_token_ids.assign(6, 5);
  manifest.max_new_tokens = 4;
  const auto reserved = table.Reserve(manifest);
  REQUIRE(reserved.ok());
  CHECK(reserved->rank_heads.size() == 2);
  const std::vector<uint8_t> payload(6 * 16, 3);
  const auto begin = [&](uint32_t head, uint32_t end) {
    auto landing =
        table.BeginChunk({reserved->transfer_id, 1, "kv", head, end, 0, 6, Crc32c(payload)},
                         payload.size() * (end - head));
    REQUIRE(landing.ok());
    return *std::move(landing);
  };
  for (const auto& [head, end] : {std::pair{0u, 1u}, {0u, 2u}, {1u, 3u}, {2u, 3u}, {3u, 4u}}) {
    const absl::Status refused = begin(head, end)->TargetsOn(1).status();
    CHECK(absl::IsInvalidArgument(refused));
    CHECK(refused.message().find("rank 1 takes the heads [1, 2)") != std::string::npos);
  }
  for (const bool again : {false, true}) {
    const auto landing = begin(1, 2);
    const auto targets = landing->TargetsOn(1);
    REQUIRE(targets.ok());
    uint64_t bytes = 0;
    for (const auto& target : *targets) {
      CHECK(target.use == (again ? ChunkLanding::Use::kCompare : ChunkLanding::Use::kWrite));
      CHECK(target.offset + target.bytes <= ranks[1]->kind_bytes(0));
      bytes += target.bytes;
    }
    CHECK(bytes == payload.size());
    landing->Received(Crc32c(payload), /*differs=*/false);
    const auto blocks = landing->Finish();
    REQUIRE(blocks.ok());
    CHECK(*blocks == (again ? 0 : 2));
  }
  const auto other = begin(1, 2);
  REQUIRE(other->TargetsOn(1).ok());
  other->Received(Crc32c(payload), /*differs=*/true);
  CHECK(absl::IsFailedPrecondition(other->Finish().status()));
}

TEST_CASE("chunks land in the pools of the ranks that have their heads") {
  LandOnRanks(Way::kHere);
}
TEST_CASE("a link writes to the pools of the ranks that have the heads") {
  LandOnRanks(Way::kTargets);
}
TEST_CASE("chunks land in the pools of ranks on other hosts") { LandOnRanks(Way::kFar); }

}  // namespace
}  // namespace sluice
