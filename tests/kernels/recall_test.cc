// Recall and Split in tables of thousands of places, beyond the number that one block of threads
// sees at a time: which units are evicted, in which order, among few and among many stamps; and
// which have a place.
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

constexpr int32_t kSlots = 2, kKvHeads = 2, kBlockTokens = 16, kTokens = 12000, kRing = 16;
constexpr int32_t kPosition = 11990;
constexpr int32_t kRowSlots[kSlots] = {1, 0};

struct TableCase {
  const char* name;
  int32_t places;  // places, the ring's included
  int32_t free_of_8, none_of_8;
  int32_t stamps;  // number of different stamps
  int32_t misses;
};

const TableCase kCases[] = {
    {"all free", 5000, 8, 0, 1, 3000},
    {"free ones suffice", 4112, 4, 1, 40, 1500},
    {"some free, few stamps", 4200, 1, 1, 3, 2500},
    {"none free, any stamp", 2064, 0, 0, 10000, 700},
    {"all put out", 2064, 0, 0, 10000, 2048},
    {"more than places", 1100, 1, 2, 500, 2000},
    {"one", 2500, 0, 0, 900, 1},
};

// The tables of all (slot, head) pairs. Two that are made from one seed are alike.
struct Tables {
  Tables(const TableCase& c, uint64_t seed)
      : random(seed),
        place_of(kSlots, kTokens, 200, 1, kKvHeads, random),
        places(kSlots, c.places, 150, 2, kKvHeads, random),
        missing(kSlots * kKvHeads, 3000) {
    for (int32_t list = 0; list < kSlots * kKvHeads; ++list) {
      const int32_t slot = kRowSlots[list / kKvHeads], head = list % kKvHeads;
      std::vector<int32_t> units(kPosition - kRing);
      std::iota(units.begin(), units.end(), 0);
      std::shuffle(units.begin(), units.end(), random);
      for (int32_t u = 0; u < kTokens; ++u) *place_of.Row(slot, u, head) = -1;
      for (int32_t p = kRing; p < c.places; ++p) {
        int32_t* row = places.Row(slot, p, head);
        const auto kind = static_cast<int32_t>(random() % 8);
        row[0] = kind < c.free_of_8                 ? -1
                 : kind < c.free_of_8 + c.none_of_8 ? kNoPlace
                                                    : units.back();
        // Now and then the stamp is this step's own.
        const auto stamp = static_cast<int32_t>(random() % static_cast<uint64_t>(c.stamps));
        row[1] = random() % 16 == 0 ? kPosition : stamp;
        if (row[0] < 0) continue;
        *place_of.Row(slot, row[0], head) = p;
        units.pop_back();
      }
      std::vector<int32_t> chosen(units.begin(), units.begin() + c.misses);
      std::sort(chosen.begin(), chosen.end());
      missing.Put(list, chosen);
    }
  }

  Random random;
  TestRows<int32_t> place_of, places;
  TestLists missing;
};

void TestRecall(const KernelTable& table, Random& random) {
  const Guarded<int32_t> slots = BufferOf<int32_t>({kRowSlots[0], kRowSlots[1]});
  const Guarded<int32_t> positions = BufferOf<int32_t>({kPosition, kPosition});
  for (const TableCase& c : kCases) {
    INFO(c.name);
    const uint64_t seed = random();
    Tables got(c, seed), want(c, seed);
    const Guarded<int32_t> home_pages = ShuffledPages(kSlots, kTokens / kBlockTokens, 1, random);
    const Guarded<int32_t> hbm_pages =
        ShuffledPages(kSlots, (c.places + kBlockTokens - 1) / kBlockTokens, 1, random);
    const auto run = [&](const KernelTable& path, Tables& t, Guarded<int32_t>* sources,
                         Guarded<int32_t>* targets, Guarded<int32_t>* counts) {
      RecallParams p = {};
      p.residency = {t.place_of.view, t.places.view, kRing, c.places};
      p.slots = slots.data();
      p.positions = positions.data();
      p.missing = t.missing.view;
      p.home.block_table = home_pages.data();
      p.home.table_stride = kTokens / kBlockTokens;
      p.resident.block_table = hbm_pages.data();
      p.resident.table_stride = (c.places + kBlockTokens - 1) / kBlockTokens;
      p.home.block_tokens = p.resident.block_tokens = kBlockTokens;
      p.home.kv_heads = p.resident.kv_heads = kKvHeads;
      p.source_units = sources->data();
      p.target_units = targets->data();
      p.move_counts = counts->data();
      p.rows = kSlots;
      p.kv_heads = kKvHeads;
      p.unit_tokens = 1;
      RunWorkers(path.recall, p, 1);
    };
    const int64_t entries = got.missing.units.size();
    Guarded<int32_t> sources(entries), targets(entries), counts(kSlots * kKvHeads);
    Guarded<int32_t> want_sources(entries), want_targets(entries), want_counts(counts.size());
    run(table, got, &sources, &targets, &counts);
    run(Reference(), want, &want_sources, &want_targets, &want_counts);
    CHECK(got.place_of.data.Damage() + got.places.data.Damage() + sources.Damage() +
              targets.Damage() + counts.Damage() ==
          "");
    CHECK(std::ranges::equal(got.place_of.data.span(), want.place_of.data.span()));
    CHECK(std::ranges::equal(got.places.data.span(), want.places.data.span()));
    for (int64_t list = 0; list < counts.size(); ++list) {
      REQUIRE(counts[list] == want_counts[list]);
      for (int64_t i = list * got.missing.view.capacity, n = 0; n < counts[list]; ++i, ++n) {
        REQUIRE(sources[i] == want_sources[i]);
        REQUIRE(targets[i] == want_targets[i]);
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("recall evicts the reference's units among thousands of places",
                          TestRecall)

// Every unit that has a place is listed, whatever the selection names.
void TestSplitWhole(const KernelTable& table, Random& random) {
  const Guarded<int32_t> slots = BufferOf<int32_t>({kRowSlots[0], kRowSlots[1]});
  const Guarded<int32_t> positions = BufferOf<int32_t>({kPosition, kPosition});
  for (const TableCase& c : kCases) {
    INFO(c.name);
    const uint64_t seed = random();
    Tables got(c, seed), want(c, seed);
    const int64_t lists = kSlots * kKvHeads;
    TestLists resident(lists, c.places), want_resident(lists, c.places);
    TestLists missing(lists, 3000), want_missing(lists, 3000);
    Guarded<int32_t> places(lists * c.places), want_places(lists * c.places);
    const auto run = [&](const KernelTable& path, Tables& t, TestLists& of_resident,
                         Guarded<int32_t>& of_places, TestLists& of_missing) {
      SplitParams p{};
      p.residency = {t.place_of.view, t.places.view, kRing, c.places};
      p.slots = slots.data();
      p.positions = positions.data();
      p.selected = t.missing.view;
      p.resident = of_resident.view;
      p.places = of_places.data();
      p.missing = of_missing.view;
      p.rows = kSlots;
      p.kv_heads = kKvHeads;
      p.unit_tokens = 1;
      p.whole = true;
      RunWorkers(path.split, p, 1);
    };
    run(table, got, resident, places, missing);
    run(Reference(), want, want_resident, want_places, want_missing);
    CHECK(got.places.data.Damage() + resident.Damage() + places.Damage() + missing.Damage() == "");
    for (int64_t list = 0; list < lists; ++list) {
      REQUIRE(resident.List(list) == want_resident.List(list));
      REQUIRE(missing.List(list) == want_missing.List(list));
      for (int64_t i = 0; i < resident.counts[list]; ++i) {
        REQUIRE(places[list * c.places + i] == want_places[list * c.places + i]);
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("split lists the reference's units among thousands of places",
                          TestSplitWhole)

}  // namespace
}  // namespace sluice::kernels
