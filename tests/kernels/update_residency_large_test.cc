// UpdateResidency among thousands of places, in a few steps: pools that are full, that fill up in
// the midst of a step, that have room for everything, with stamps near each other and far apart.
// Everything must agree with the reference to the last entry.
#include <set>

#include "tests/kernels/latent_support.h"

namespace sluice::kernels {
namespace {

constexpr int32_t kSlots = 2, kRowsPerPage = 128, kBlockTokens = 64;

struct LargeCase {
  const char* name;
  int32_t tokens;        // tokens of a sequence
  int32_t places;        // places in the table
  int32_t had;           // places of them that the sequence has
  int32_t taken;         // places taken before the first step
  int32_t oldest, span;  // their stamps are in [oldest, oldest + span)
  int32_t grouped;       // number of neighbouring stamps that are made one
  int32_t selected, misses, rows;
};

const LargeCase kCases[] = {
    {"a full pool, a few hundred missing", 9000, 5000, 5000, 5000, 7000, 1900, 1, 2048, 100, 1},
    {"stamps of steps that missed many", 9000, 6600, 6600, 6600, 8400, 500, 50, 2048, 605, 1},
    {"most are missing", 9000, 5000, 4600, 4600, 8000, 900, 7, 2048, 1800, 1},
    {"nothing is missing", 9000, 6600, 6600, 6600, 8400, 500, 50, 2048, 0, 1},
    {"all are of one age", 9000, 5000, 5000, 5000, 3, 1, 1, 1500, 700, 1},
    {"stamps far apart", 20000, 5000, 4900, 4900, 1, 19000, 1, 2000, 333, 1},
    {"old ones of one age, and others", 20000, 5000, 5000, 5000, 1, 16000, 12000, 2000, 1900, 1},
    {"more places than keys are kept", 30000, 20000, 19000, 19000, 2, 29000, 1, 2048, 500, 1},
    {"room for everything", 9000, 9100, 9064, 8000, 8500, 400, 1, 2048, 30, 1},
    {"full in the midst of a step", 9000, 6600, 6592, 6400, 8000, 900, 9, 2048, 300, 1},
    {"an empty pool", 9000, 6400, 6400, 0, 1, 1, 1, 2048, 2048, 1},
    {"four rows of a sequence", 9000, 9000, 8800, 8800, 6000, 2000, 3, 2048, 400, 4},
    {"lists longer than a chunk", 9000, 8000, 7900, 7900, 8000, 900, 3, 5000, 900, 1},
    {"four rows, lists longer than a chunk", 20000, 13000, 12900, 12900, 16000, 2000, 3, 2300, 400,
     4},
    {"half a million tokens", 1 << 19, 4000, 4000, 4000, 1, 1 << 18, 1, 600, 200, 1},
};

class Pool {
 public:
  Pool(const LargeCase& c, uint64_t seed)
      : case_(c),
        random_(seed),
        moves(c.rows * c.selected),
        home(kSlots, c.tokens, kBlockTokens, 2, 2, DType::kFloat32, random_),
        pool(kSlots, c.places, kBlockTokens, 2, 2, DType::kFloat32, random_),
        place_of(kSlots, c.tokens + 64, kRowsPerPage, 1, 1, random_),
        table(kSlots, c.places, kRowsPerPage, 2, 1, random_),
        counters(kSlots),
        resident(kSlots * c.rows, c.selected),
        arriving(kSlots * c.rows, c.selected),
        sources(int64_t{kSlots} * c.rows * moves),
        targets(int64_t{kSlots} * c.rows * moves),
        move_counts(kSlots * c.rows) {
    std::vector<int32_t> units(static_cast<size_t>(c.tokens - 100));
    std::iota(units.begin(), units.end(), 0);
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      std::shuffle(units.begin(), units.end(), random_);
      for (int32_t u = 0; u < c.tokens + 64; ++u) *place_of.Row(slot, u, 0) = -1;
      for (int32_t p = 0; p < c.places; ++p) {
        int32_t* row = table.Row(slot, p, 0);
        row[0] = p < c.taken ? units[static_cast<size_t>(p)] : p < c.had ? -1 : kNoPlace;
        const auto stamp =
            c.oldest + static_cast<int32_t>(random_() % static_cast<uint64_t>(c.span));
        row[1] = stamp / c.grouped * c.grouped;
        if (p < c.taken) *place_of.Row(slot, row[0], 0) = p;
      }
      counters[slot] = {};
    }
  }

  // Updates with both sequences' rows, of which the last is at `last`.
  void UpdateResidency(const KernelTable& path, int32_t last, const TestLists& selected,
                       int workers) {
    Guarded<int32_t> slots(kSlots * case_.rows), positions(kSlots * case_.rows);
    for (int32_t r = 0; r < kSlots * case_.rows; ++r) {
      slots[r] = r / case_.rows;
      positions[r] = last - case_.rows + 1 + r % case_.rows;
    }
    const UpdateResidencyParams p = {.residency = {place_of.view, table.view, 0, case_.places},
                                     .slots = slots.data(),
                                     .positions = positions.data(),
                                     .selected = selected.view,
                                     .resident = resident.units.data(),
                                     .resident_counts = resident.counts.data(),
                                     .arriving = arriving.units.data(),
                                     .arriving_counts = arriving.counts.data(),
                                     .home = home.view,
                                     .pool = pool.view,
                                     .source_units = sources.data(),
                                     .target_units = targets.data(),
                                     .move_counts = move_counts.data(),
                                     .counters = counters.data(),
                                     .move_capacity = moves,
                                     .rows = kSlots * case_.rows,
                                     .ahead = case_.rows,
                                     .forget = false,
                                     .speculative = false,
                                     .whole = nullptr};
    RunWorkers(path.update_residency, p, workers);
    CHECK(resident.Damage() + arriving.Damage() + sources.Damage() + targets.Damage() +
              move_counts.Damage() + place_of.data.Damage() + table.data.Damage() +
              counters.Damage() ==
          "");
  }

  // Returns everything that a step leaves behind.
  std::vector<std::vector<int32_t>> State() {
    std::vector<std::vector<int32_t>> all(2 * kSlots);
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      for (int32_t p = 0; p < case_.places; ++p) {
        const int32_t* row = table.Row(slot, p, 0);
        all[static_cast<size_t>(slot)].push_back(row[0]);
        all[static_cast<size_t>(slot)].push_back(row[0] < 0 ? 0 : row[1]);
      }
      for (int32_t u = 0; u < case_.tokens + 64; ++u) {
        all[static_cast<size_t>(kSlots + slot)].push_back(*place_of.Row(slot, u, 0));
      }
    }
    for (int64_t r = 0; r < int64_t{kSlots} * case_.rows; ++r) {
      all.push_back(resident.List(r));
      all.push_back(arriving.List(r));
      all.push_back({move_counts[r]});
      const int64_t first = r * moves;
      all.emplace_back(sources.data() + first, sources.data() + first + move_counts[r]);
      all.emplace_back(targets.data() + first, targets.data() + first + move_counts[r]);
    }
    return all;
  }

 private:
  const LargeCase case_;
  Random random_;

 public:
  const int32_t moves;
  TestLatents home, pool;
  TestRows<int32_t> place_of, table;
  Guarded<SparseCounters> counters;
  TestLists resident, arriving;
  Guarded<int32_t> sources, targets, move_counts;
};

// Selects `misses` units without a place and others that have one, below `end`.
std::vector<int32_t> Select(const LargeCase& c, Pool& pool, int32_t slot, int32_t end,
                            Random& random) {
  std::set<int32_t> units;
  int32_t missing = 0;
  for (int32_t tries = 0; std::ssize(units) < c.selected && tries < 100 * c.selected; ++tries) {
    const bool want_missing = missing < c.misses;
    int32_t unit = static_cast<int32_t>(random() % static_cast<uint64_t>(end));
    if (!want_missing) {
      unit =
          pool.table.Row(slot, static_cast<int64_t>(random() % static_cast<uint64_t>(c.had)), 0)[0];
    }
    if (unit < 0 || unit >= end) continue;
    const bool misses = *pool.place_of.Row(slot, unit, 0) < 0;
    if (misses != want_missing) continue;
    if (units.insert(unit).second) missing += misses ? 1 : 0;
  }
  return {units.begin(), units.end()};
}

void TestLargeUpdate(const KernelTable& table, Random& random) {
  for (const LargeCase& c : kCases) {
    INFO(c.name);
    const uint64_t seed = random();
    Pool got(c, seed), want(c, seed);
    for (int32_t step = 0; step < 3; ++step) {
      INFO("step " << step);
      const int32_t last = c.tokens - 80 + step * c.rows + c.rows;
      TestLists selected(int64_t{kSlots} * c.rows, c.selected);
      for (int32_t r = 0; r < kSlots * c.rows; ++r) {
        selected.Put(r, Select(c, want, r / c.rows, last - c.rows + 1, random));
      }
      got.UpdateResidency(table, last, selected, 1 + step);
      want.UpdateResidency(Reference(), last, selected, 1);
      const auto of_got = got.State(), of_want = want.State();
      for (size_t i = 0; i < of_want.size(); ++i) {
        INFO("part " << i);
        REQUIRE(of_got[i] == of_want[i]);
      }
      for (int32_t slot = 0; slot < kSlots; ++slot) {
        REQUIRE(got.counters[slot].missing == want.counters[slot].missing);
        REQUIRE(got.counters[slot].selected == want.counters[slot].selected);
        REQUIRE(got.counters[slot].steps == want.counters[slot].steps);
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("residency is updated among thousands of places", TestLargeUpdate)

}  // namespace
}  // namespace sluice::kernels
