// Ranks that have sequences of their own: which rank a sequence goes to, and where its caches land.
#include "src/kv/rank_ledger.h"

#include "src/base/error.h"
#include "tests/test_main.h"
#include "tests/unit/kv/transfer_support.h"

namespace sluice {
namespace {

using Ranks = std::vector<int>;

TEST_CASE("a sequence goes to the rank with the fewest that has room for it") {
  CacheLayout layout = TwoKinds();
  layout.kinds.resize(1);  // blocks of 4 tokens
  const auto hbm = MakePool("hbm", layout, static_cast<size_t>(layout.BytesFor(40)) + 8192);
  const int64_t most = hbm->Capacity()[0];
  RankLedger ledger(hbm.get(), /*ranks=*/3);
  CHECK(ledger.ranks() == 3);
  CHECK(ledger.RanksFor(8) == Ranks{0, 1, 2});
  auto first = ledger.Count(0, 5, 5);
  auto second = ledger.Count(1, 16, 16);
  CHECK(ledger.RanksFor(8) == Ranks{2, 0, 1});
  const auto third = ledger.Count(2, 9, 9);
  CHECK(ledger.RanksFor(8) == Ranks{0, 2, 1});
  CHECK(ledger.sequences(2) == 1);
  // Rank 0 has given two blocks, rank 1 four and rank 2 three. Those without room come last.
  CHECK(ledger.RanksFor(most - 8) == Ranks{0, 2, 1});
  CHECK(ledger.RanksFor(most - 12) == Ranks{0, 2, 1});
  const auto fourth = ledger.Count(0, 1, 1);
  CHECK(ledger.RanksFor(most - 12) == Ranks{2, 0, 1});
  CHECK(ledger.RanksFor(4) == Ranks{2, 1, 0});
  second.reset();
  CHECK(ledger.RanksFor(most).front() == 1);
  CHECK(ledger.sequences(1) == 0);
  // More may be counted than there is room for: they wait.
  const auto large = ledger.Count(1, most, most), larger = ledger.Count(1, most, most);
  CHECK(ledger.RanksFor(4) == Ranks{2, 0, 1});
}

TEST_CASE("a sequence goes to the rank that has half of its prompt, if there is room") {
  CacheLayout layout = TwoKinds();
  const auto hbm = MakePool("hbm", layout, static_cast<size_t>(layout.BytesFor(48)) + 16384);
  RankLedger ledger(hbm.get(), /*ranks=*/3);
  const auto first = ledger.Count(1, 8, 8), second = ledger.Count(1, 8, 8);
  CHECK(ledger.RanksFor(8, {0, 16, 0}, 32) == Ranks{1, 0, 2});
  // Less than half only decides among ranks with equally many sequences.
  CHECK(ledger.RanksFor(8, {0, 8, 0}, 32) == Ranks{0, 2, 1});
  CHECK(ledger.RanksFor(8, {0, 0, 8}, 32) == Ranks{2, 0, 1});
  // Among ranks that have half or more the one with the fewest sequences comes first.
  CHECK(ledger.RanksFor(8, {0, 24, 16}, 32) == Ranks{2, 1, 0});
  const auto rest = ledger.Count(1, hbm->Capacity()[0] - 16, 1);
  CHECK(ledger.RanksFor(8, {0, 32, 0}, 32) == Ranks{0, 2, 1});
}

// A table over the pools of two ranks.
struct RankTable : Table {
  RankTable() : Table(64 << 10), other(MakePool("dram", layout, 64 << 10)), ledger(hbm.get(), 2) {
    other->SetRank(1);
    TransferTable::Options options;
    options.model_fingerprint = "f00d";
    options.vocab_size = 100;
    options.max_context = 1000;
    options.max_lease = absl::Seconds(10);
    options.max_chunk_bytes = 4096;
    options.footprint = &Whole;
    options.other_ranks = {other.get()};
    options.ledger = &ledger;
    table = std::make_unique<TransferTable>(options, dram.get(), hbm.get(), &clock);
  }
  ~RankTable() { table.reset(); }

  ReadySequence Take(const std::string& id) {
    REQUIRE(table->Commit(id, {}, nullptr).ok());
    const auto attached = table->Attach(ById(id));
    REQUIRE(attached.ok());
    auto ready = table->TakeReady(*attached);
    REQUIRE((ready.ok() && ready->has_value()));
    return **std::move(ready);
  }

  std::unique_ptr<PagePool> other;
  RankLedger ledger;
};

TEST_CASE("transfers land in the pool of the rank where they were reserved") {
  RankTable t;
  const std::string first = t.ReserveAndFill(), second = t.ReserveAndFill();
  CHECK(t.ledger.sequences(0) == 1);
  CHECK(t.ledger.sequences(1) == 1);
  ReadySequence on_zero = t.Take(first), on_one = t.Take(second);
  CHECK(on_zero.home->pool() == t.dram.get());
  CHECK(on_one.home->pool() == t.other.get());
  CHECK((t.Intact(*on_zero.home, first) && t.Intact(*on_one.home, second)));
  // They count until they run.
  CHECK(t.ledger.sequences(1) == 1);
  on_one.place.reset();
  CHECK(t.ledger.sequences(1) == 0);
  on_zero = {};
  const std::string third = t.Reserve(), fourth = t.Reserve();
  CHECK(t.ledger.sequences(0) + t.ledger.sequences(1) == 2);
  REQUIRE(t.table->Abort(third, "").ok());
  t.clock.Advance(absl::Seconds(11));
  CHECK(t.Reap() == 1);
  CHECK(t.ledger.sequences(0) + t.ledger.sequences(1) == 0);
}

TEST_CASE("a transfer is refused when no rank has room for it") {
  RankTable t;
  std::vector<std::string> ids;
  absl::Status status;
  while (status.ok()) {
    const auto reserved = t.table->Reserve(t.Good());
    status = reserved.status();
    if (reserved.ok()) ids.push_back(reserved->transfer_id);
  }
  CHECK(ReasonOf(status) == "DRAM_FULL");
  CHECK(std::string(status.message()).find("of any rank") != std::string::npos);
  CHECK(ids.size() % 2 == 0);  // both are full
  CHECK(t.ledger.sequences(0) == t.ledger.sequences(1));
  REQUIRE(t.table->Abort(ids[1], "").ok());
  CHECK(t.table->Reserve(t.Good()).ok());
}

TEST_CASE("a prefix is shared on the rank that has it") {
  RankTable t;
  t.Reserve();  // on rank 0
  const std::string id = t.ReserveAndFill();
  {
    const ReadySequence ready = t.Take(id);
    REQUIRE(ready.home->pool() == t.other.get());
    t.table->prefixes(1)->Publish("", absl::MakeConstSpan(ready.prompt).subspan(0, kContext - 1),
                                  PrefixCache::Readers::kNone, *ready.home);
  }
  const auto again = t.table->Reserve(t.Good());
  REQUIRE(again.ok());
  CHECK(again->cached_tokens == 16);
  CHECK(t.ledger.sequences(1) == 1);
  const std::vector<int32_t> prompt(kContext, 5);
  const auto known = t.table->KnownBeginning("", prompt, 30);
  REQUIRE(known != nullptr);
  CHECK(known->pool() == t.other.get());
  CHECK(known->shared_tokens() == 16);
  CHECK(t.table->KnownBeginning("another", prompt, 30) == nullptr);
}

}  // namespace
}  // namespace sluice
