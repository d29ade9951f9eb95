// Bring on tables of tens to tens of thousands of places, over several steps of the same sequences:
// what is selected, which tokens give up their places, who gets which, the moves, the lists and the
// counters are the reference's, to the last entry.
#include <cmath>
#include <limits>

#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

constexpr int32_t kSlots = 4, kRows = 4, kKvHeads = 3, kBlockTokens = 16, kRing = 32;
constexpr int32_t kRowSlots[kRows] = {2, -1, 0, 3};
constexpr int32_t kLists = kRows * kKvHeads;

struct BringCase {
  const char* name;
  int32_t tokens;  // the longest sequence, at the end
  int32_t places;  // the ring's included
  int32_t k, divisor;
  bool whole, forget;       // `whole` in the order of places in every other step
  bool persistent = false;  // KV head 1 is
  bool some = false;        // not every list is wanted, nor listed
  float margin = std::numeric_limits<float>::infinity();
  int32_t alike = 0;  // scores of so many values; 0: any
  int steps = 3;
  int32_t rows = kRows;
  int32_t copies = 1;  // of the rows, each with sequences of its own
  bool slow = false;   // the reference is slow: one path of the CPU runs it
};

const BringCase kCases[] = {
    {"few tokens, all selected", 60, 96, 64, 0, true, false},
    {"what has a place, free places left", 3000, 1500, 200, 0, true, false},
    {"what has a place, none free", 3000, 32 + 300, 300, 0, true, false},
    {"what was selected", 3000, 32 + 300, 200, 0, false, false},
    {"everything anew", 3000, 32 + 300, 300, 0, false, true},
    {"everything anew, all that has a place", 3000, 32 + 300, 300, 0, true, true},
    {"more than there are places", 3000, 32 + 100, 700, 0, false, false},
    {"more than there are places, whole", 3000, 32 + 800, 700, 3, true, false},
    {"a tenth of long rows", 9000, 900, 64, 10, true, false},
    {"persistent heads", 9000, 900, 64, 10, true, false, true},
    {"persistent heads and what was selected", 9000, 900, 64, 10, false, false, true},
    {"some lists", 9000, 900, 64, 10, true, false, true, true},
    {"a margin", 3000, 32 + 300, 300, 0, false, false, false, false, 0.7f},
    {"scores alike", 5000, 32 + 500, 500, 0, true, false, false, false,
     std::numeric_limits<float>::infinity(), 3},
    {"scores alike, what was selected", 20000, 32 + 2000, 64, 10, false, false, false, true,
     std::numeric_limits<float>::infinity(), 7},
    {"thousands of places", 40000, 32 + 12000, 64, 10, true, false, false, true,
     std::numeric_limits<float>::infinity(), 0, 2, 2, 1, true},
    {"many lists of many places", 20000, 32 + 14000, 64, 10, true, false, false, false,
     std::numeric_limits<float>::infinity(), 0, 2, kRows, 12, true},
    {"half a million tokens", 530000, 32 + 60000, 64, 10, true, false, true, false,
     std::numeric_limits<float>::infinity(), 0, 1, 1, 1, true},
};

int32_t SlotsOf(const BringCase& c) { return kSlots * c.copies; }
int32_t RowsOf(const BringCase& c) { return c.rows * c.copies; }
int32_t ListsOf(const BringCase& c) { return kLists * c.copies; }
int32_t SlotOf(int32_t row) {
  const int32_t slot = kRowSlots[row % kRows];
  return slot < 0 ? -1 : slot + row / kRows * kSlots;
}

// Returns the position of a slot's row in the first step.
int32_t FirstPosition(const BringCase& c, int32_t of_slot) {
  const int32_t last = c.tokens - c.steps, slot = of_slot % kSlots;
  return slot == kRowSlots[0]   ? last
         : slot == kRowSlots[2] ? std::max(last / 3, 40)
                                : std::max(last / 2, 45);
}

struct Tables {
  Tables(const BringCase& c, uint64_t seed)
      : random(seed),
        place_of(SlotsOf(c), c.tokens, 200, 1, kKvHeads, random),
        places(SlotsOf(c), c.places, 150, 2, kKvHeads, random),
        persistent(BufferOf<int32_t>({0, c.persistent ? 1 : 0, 0})),
        counters(SlotsOf(c)),
        resident(ListsOf(c), std::max(c.places, std::max(c.k, c.tokens / 3 + kRing))),
        of_resident(ListsOf(c) * int64_t{resident.view.capacity}),
        moves(std::max(c.k, c.divisor > 0 ? c.tokens / c.divisor : 0)),
        sources(int64_t{ListsOf(c)} * moves),
        targets(int64_t{ListsOf(c)} * moves),
        counts(ListsOf(c)) {
    for (SparseCounters& counter : counters) counter = {};
    for (int32_t slot = 0; slot < SlotsOf(c); ++slot) {
      for (int32_t head = 0; head < kKvHeads; ++head) {
        std::vector<int32_t> units(static_cast<size_t>(
            std::max(std::min(FirstPosition(c, slot), c.tokens) - kRing + 2, 0)));
        std::iota(units.begin(), units.end(), 0);  // the last may be in the ring as well
        std::shuffle(units.begin(), units.end(), random);
        for (int32_t u = 0; u < c.tokens; ++u) *place_of.Row(slot, u, head) = -1;
        for (int32_t p = kRing; p < c.places; ++p) {
          int32_t* row = places.Row(slot, p, head);
          const uint64_t kind = random() % 8;
          row[0] = p + 20 > c.places ? kNoPlace : kind == 0 || units.empty() ? -1 : units.back();
          row[1] = static_cast<int32_t>(random() % 40) - 1;
          if (row[0] < 0) continue;
          *place_of.Row(slot, row[0], head) = p;
          units.pop_back();
        }
      }
    }
  }

  Random random;
  TestRows<int32_t> place_of, places;
  Guarded<int32_t> persistent;
  Guarded<SparseCounters> counters;
  TestLists resident;
  Guarded<int32_t> of_resident;
  int32_t moves;
  Guarded<int32_t> sources, targets, counts;
};

void CheckEqual(const BringCase& c, const Tables& got, const Tables& want, bool moved) {
  CHECK(got.place_of.data.Damage() + got.places.data.Damage() + got.sources.Damage() +
            got.targets.Damage() + got.counts.Damage() + got.resident.Damage() +
            got.of_resident.Damage() ==
        "");
  CHECK(std::ranges::equal(got.place_of.data.span(), want.place_of.data.span()));
  CHECK(std::ranges::equal(got.places.data.span(), want.places.data.span()));
  for (int32_t slot = 0; slot < SlotsOf(c); ++slot) {
    CHECK(got.counters[slot].steps == want.counters[slot].steps);
    CHECK(got.counters[slot].selected == want.counters[slot].selected);
    CHECK(got.counters[slot].missing == want.counters[slot].missing);
    CHECK(got.counters[slot].recalled == want.counters[slot].recalled);
    CHECK(got.counters[slot].held == want.counters[slot].held);
    CHECK(got.counters[slot].recalls == want.counters[slot].recalls);
  }
  for (int64_t list = 0; list < RowsOf(c) * kKvHeads; ++list) {
    INFO("list " << list);
    REQUIRE(got.resident.counts[list] == want.resident.counts[list]);
    for (int64_t i = list * got.resident.view.capacity, n = 0; n < got.resident.counts[list];
         ++i, ++n) {
      REQUIRE(got.resident.units[i] == want.resident.units[i]);
      REQUIRE(got.of_resident[i] == want.of_resident[i]);
    }
    if (!moved) continue;
    REQUIRE(got.counts[list] == want.counts[list]);
    for (int64_t i = list * got.moves, n = 0; n < got.counts[list]; ++i, ++n) {
      REQUIRE(got.sources[i] == want.sources[i]);
      REQUIRE(got.targets[i] == want.targets[i]);
    }
  }
}

void TestBring(const KernelTable& path, Random& random) {
  for (const BringCase& c : kCases) {
    if (c.slow && std::string_view(path.name) != "cuda" &&
        std::string_view(path.name) != "portable") {
      continue;
    }
    INFO(c.name);
    const uint64_t seed = random();
    Tables got(c, seed), want(c, seed);
    Guarded<int32_t> slots(RowsOf(c)), positions(RowsOf(c));
    for (int32_t row = 0; row < RowsOf(c); ++row) slots[row] = SlotOf(row);
    const int32_t blocks = (c.tokens + kBlockTokens - 1) / kBlockTokens;
    const int32_t place_blocks = (c.places + kBlockTokens - 1) / kBlockTokens;
    const Guarded<int32_t> home_pages = ShuffledPages(SlotsOf(c), blocks, 1, random);
    // Blocks of places by head in every other case.
    const bool by_head = (&c - kCases) % 2 == 1;
    const int32_t stride = by_head ? place_blocks * kKvHeads : place_blocks;
    const Guarded<int32_t> pages = ShuffledPages(SlotsOf(c), stride, 1, random);
    const Guarded<int32_t> heads = BufferOf<int32_t>({0, 2 * place_blocks, place_blocks});
    Guarded<float> scores(int64_t{ListsOf(c)} * c.tokens);
    Guarded<int32_t> wanted(ListsOf(c)), listed(ListsOf(c));
    for (int step = 0; step < c.steps; ++step) {
      for (int32_t row = 0; row < RowsOf(c); ++row) {
        positions[row] = slots[row] < 0 ? 0 : FirstPosition(c, slots[row]) + step;
      }
      for (float& score : scores) {
        const double value = std::ldexp(static_cast<double>(random() >> 11), -53) * 2 - 1;
        score = c.alike > 0 ? static_cast<float>(random() % static_cast<uint64_t>(c.alike))
                            : static_cast<float>(value);
        if (random() % 256 == 0) score = std::numeric_limits<float>::quiet_NaN();
      }
      for (int32_t list = 0; list < ListsOf(c); ++list) {
        listed[list] = !c.some || random() % 4 != 0 ? 1 : 0;
        wanted[list] = listed[list] != 0 && random() % 2 == 0 ? 1 : 0;
      }
      const auto run = [&](const KernelTable& on, Tables& t, int workers) {
        BringParams p{};
        p.select.scores = scores.data();
        p.select.score_stride = c.tokens;
        p.select.slots = slots.data();
        p.select.positions = positions.data();
        p.select.rows = RowsOf(c);
        p.select.kv_heads = kKvHeads;
        p.select.unit_tokens = 1;
        p.select.k = c.k;
        p.select.k_divisor = c.divisor;
        p.select.first_units = 4;
        p.select.last_units = kRing;
        p.select.margin = c.margin;
        p.select.wanted = c.some ? wanted.data() : nullptr;
        p.residency = {t.place_of.view, t.places.view, kRing, c.places,
                       c.persistent ? t.persistent.data() : nullptr};
        p.listed = c.some ? listed.data() : nullptr;
        p.resident = t.resident.view;
        p.places = t.of_resident.data();
        p.home.block_table = home_pages.data();
        p.home.table_stride = blocks;
        p.cache.block_table = pages.data();
        p.cache.table_stride = stride;
        p.cache.head_tables = by_head ? heads.data() : nullptr;
        p.home.block_tokens = p.cache.block_tokens = kBlockTokens;
        p.home.kv_heads = p.cache.kv_heads = kKvHeads;
        p.source_units = t.sources.data();
        p.target_units = t.targets.data();
        p.move_counts = t.counts.data();
        p.move_capacity = t.moves;
        p.counters = t.counters.data();
        p.whole = c.whole;
        p.by_place = step % 2 == 0;
        p.forget = c.forget;
        RunThreads(on.bring, p, workers);
      };
      for (Tables* t : {&got, &want}) {
        for (int32_t& count : t->resident.counts) count = -1;  // of lists that are not listed
      }
      run(path, got, 3);
      run(Reference(), want, 1);
      INFO("step " << step);
      CheckEqual(c, got, want, true);
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("bring selects, places and lists what the reference does", TestBring)

// A head that is persistent changes no table, whatever it selects, and needs no lists of moves.
void TestPersistentAlone(const KernelTable& path, Random& random) {
  const BringCase c = {"", 9000, 900, 64, 10, true, false, true};
  const uint64_t seed = random();
  Tables got(c, seed), want(c, seed);
  const Guarded<int32_t> slots = BufferOf<int32_t>({2, -1, 0, 3});
  const Guarded<int32_t> positions = BufferOf<int32_t>({8990, 0, 70, 5000});
  Guarded<float> scores(int64_t{kLists} * c.tokens);
  for (float& score : scores) score = static_cast<float>(random() % 100000);
  Guarded<int32_t> wanted(kLists);
  for (int32_t list = 0; list < kLists; ++list) wanted[list] = list % kKvHeads == 1 ? 1 : 0;
  const auto run = [&](const KernelTable& on, Tables& t) {
    for (int32_t& count : t.resident.counts) count = -1;
    BringParams p{};
    p.select.scores = scores.data();
    p.select.score_stride = c.tokens;
    p.select.slots = slots.data();
    p.select.positions = positions.data();
    p.select.rows = kRows;
    p.select.kv_heads = kKvHeads;
    p.select.unit_tokens = 1;
    p.select.k = c.k;
    p.select.k_divisor = c.divisor;
    p.select.last_units = kRing;
    p.select.margin = c.margin;
    p.select.wanted = p.listed = wanted.data();
    p.residency = {t.place_of.view, t.places.view, kRing, c.places, t.persistent.data()};
    p.resident = t.resident.view;
    p.places = t.of_resident.data();
    p.counters = t.counters.data();
    p.whole = p.by_place = true;
    RunThreads(on.bring, p, 2);
  };
  run(path, got);
  run(Reference(), want);
  CheckEqual(c, got, want, false);
  const Tables before(c, seed);
  CHECK(std::ranges::equal(got.place_of.data.span(), before.place_of.data.span()));
  CHECK(std::ranges::equal(got.places.data.span(), before.places.data.span()));
  CHECK(got.resident.counts[1] == 8991 / 10);
}
SLUICE_TEST_ON_EVERY_PATH("bring of persistent heads alone changes no place", TestPersistentAlone)

}  // namespace
}  // namespace sluice::kernels
