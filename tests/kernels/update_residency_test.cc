// UpdateResidency under random traffic: sequences of one to four rows grow, end and begin anew, and
// select at random. After every step the tables must be sound, evicted units must have been used
// longest ago, and everything must agree with the reference to the last entry.
#include <map>
#include <set>

#include "tests/kernels/latent_support.h"

namespace sluice::kernels {
namespace {

constexpr int32_t kSlots = 4, kMaxTokens = 640, kBlockTokens = 16;

struct UpdateCase {
  const char* name;
  int32_t max_rows;  // most rows of a sequence
  int32_t max_selected;
  int32_t ahead;
  int32_t spare;  // places beyond what the rows may need
  bool forget;
  bool counters;
  bool speculative = false;
};

const UpdateCase kCases[] = {
    {"one row, just enough places", 1, 40, 1, 0, false, true},
    {"one row, spare places", 1, 40, 1, 50, false, true},
    {"one row, nothing ahead", 1, 24, 0, 9, false, false},
    {"one row, for the next step", 1, 40, 0, 30, false, true, true},
    {"two rows, for the next step", 2, 30, 0, 40, false, true, true},
    {"four rows, just enough places", 4, 30, 4, 0, false, true},
    {"three rows, spare places", 3, 30, 3, 64, false, true},
    {"four rows, fetched anew in every step", 4, 20, 4, 30, true, true},
    {"many selected", 2, 200, 2, 100, false, true},
};

int32_t PlacesOf(const UpdateCase& c) { return c.max_rows * c.max_selected + c.ahead + c.spare; }

// One step's rows and the units selected for each.
struct StepInput {
  StepInput(int64_t rows, int32_t capacity)
      : slots(rows), positions(rows), selected(rows, capacity) {}
  Guarded<int32_t> slots, positions;
  TestLists selected;
};

struct StepOutput {
  StepOutput(int64_t rows, int32_t capacity, int32_t moves)
      : resident(rows, capacity),
        arriving(rows, capacity),
        source_units(rows * moves),
        target_units(rows * moves),
        move_counts(rows) {}
  std::string Damage() const {
    return resident.Damage() + arriving.Damage() + source_units.Damage() + target_units.Damage() +
           move_counts.Damage();
  }
  TestLists resident, arriving;
  Guarded<int32_t> source_units, target_units, move_counts;
};

// The tables that one kernel path works on. Two that are made from one seed are alike.
class World {
 public:
  World(const UpdateCase& c, uint64_t seed)
      : case_(c),
        random_(seed),
        places(PlacesOf(c)),
        move_capacity(c.max_rows * c.max_selected),
        home(kSlots, kMaxTokens, kBlockTokens, 512, 64, DType::kFloat8E4M3, random_),
        pool(kSlots, places, 32, 512, 64, DType::kFloat8E4M3, random_),
        place_of(kSlots, kMaxTokens, 7, 1, 1, random_),
        table(kSlots, places, 5, 2, 1, random_),
        counters(kSlots),
        whole(kSlots) {
    for (int32_t slot = 0; slot < kSlots; ++slot) Begin(slot, places);
  }

  // Puts a sequence that has the first `count` places into the slot.
  void Begin(int32_t slot, int32_t count) {
    counters[slot] = {};
    whole[slot] = 0;
    for (int32_t u = 0; u < kMaxTokens; ++u) *place_of.Row(slot, u, 0) = -1;
    for (int32_t p = 0; p < places; ++p) {
      table.Row(slot, p, 0)[0] = p < count ? -1 : kNoPlace;
      table.Row(slot, p, 0)[1] = -1;
    }
  }

  // Puts a whole sequence, with the first `count` units, into the slot.
  void BeginWhole(int32_t slot, int32_t count) {
    Begin(slot, places);
    whole[slot] = 1;
    for (int32_t u = 0; u < count; ++u) {
      *place_of.Row(slot, u, 0) = u;
      table.Row(slot, u, 0)[0] = table.Row(slot, u, 0)[1] = u;
    }
  }

  void UpdateResidency(const KernelTable& path, const StepInput& in, StepOutput& out, int workers) {
    PagedLatents of_home = home.view, of_pool = pool.view;
    of_home.base = of_pool.base = nullptr;
    const UpdateResidencyParams p = {.residency = {place_of.view, table.view, 0, places},
                                     .slots = in.slots.data(),
                                     .positions = in.positions.data(),
                                     .selected = in.selected.view,
                                     .resident = out.resident.units.data(),
                                     .resident_counts = out.resident.counts.data(),
                                     .arriving = out.arriving.units.data(),
                                     .arriving_counts = out.arriving.counts.data(),
                                     .home = of_home,
                                     .pool = of_pool,
                                     .source_units = out.source_units.data(),
                                     .target_units = out.target_units.data(),
                                     .move_counts = out.move_counts.data(),
                                     .counters = case_.counters ? counters.data() : nullptr,
                                     .move_capacity = move_capacity,
                                     .rows = static_cast<int32_t>(in.slots.size()),
                                     .ahead = case_.ahead,
                                     .forget = case_.forget,
                                     .speculative = case_.speculative,
                                     .whole = case_.forget ? nullptr : whole.data()};
    workers < 4 ? RunWorkers(path.update_residency, p, workers)
                : RunThreads(path.update_residency, p, workers);
    CHECK(out.Damage() + place_of.data.Damage() + table.data.Damage() + counters.Damage() +
              whole.Damage() ==
          "");
  }

  struct Place {
    int32_t unit;
    int32_t stamp;
    bool operator==(const Place&) const = default;
  };
  std::vector<Place> Places(int32_t slot) {
    std::vector<Place> all;
    for (int32_t p = 0; p < places; ++p) {
      const int32_t* row = table.Row(slot, p, 0);
      all.push_back({row[0], row[0] < 0 ? 0 : row[1]});
    }
    return all;
  }
  std::vector<int32_t> PlaceOf(int32_t slot) {
    std::vector<int32_t> all;
    for (int32_t u = 0; u < kMaxTokens; ++u) all.push_back(*place_of.Row(slot, u, 0));
    return all;
  }

 private:
  const UpdateCase case_;
  Random random_;

 public:
  const int32_t places, move_capacity;
  TestLatents home, pool;
  TestRows<int32_t> place_of, table;
  Guarded<SparseCounters> counters;
  Guarded<int32_t> whole;
};

// Checks the contract for one sequence's step against the tables before and after it.
void CheckSequence(const UpdateCase& c, World& w, const std::vector<World::Place>& before,
                   const SparseCounters& counters_before, const StepInput& in,
                   const StepOutput& out, int64_t first, int64_t count) {
  const int32_t slot = in.slots[first], last = in.positions[first + count - 1];
  const std::vector<World::Place> after = w.Places(slot);
  const std::vector<int32_t> place_of = w.PlaceOf(slot);
  // The two tables agree, so that no unit has two places.
  std::map<int32_t, int32_t> has, had;
  for (int32_t p = 0; p < w.places; ++p) {
    const int32_t unit = after[static_cast<size_t>(p)].unit;
    if (unit >= 0) REQUIRE(place_of[static_cast<size_t>(unit)] == p);
    if (unit >= 0) REQUIRE(has.emplace(unit, p).second);
    const World::Place& old = before[static_cast<size_t>(p)];
    REQUIRE((old.unit == kNoPlace) == (unit == kNoPlace));
    if (old.unit >= 0 && !c.forget) had.emplace(old.unit, p);
  }
  for (int32_t u = 0; u < kMaxTokens; ++u) {
    if (place_of[static_cast<size_t>(u)] >= 0) REQUIRE(has.contains(u));
  }
  // Every selected unit has a place and this step's stamp; units that had a place keep it.
  std::set<int32_t> selected, kept;
  int64_t units = 0;
  for (int64_t r = first; r < first + count; ++r) {
    std::vector<int32_t> resident, arriving;
    for (int32_t unit : in.selected.List(r)) {
      selected.insert(unit);
      ++units;
      REQUIRE(has.contains(unit));
      REQUIRE(after[static_cast<size_t>(has[unit])].stamp == last);
      if (had.contains(unit)) REQUIRE(had[unit] == has[unit]);
      (had.contains(unit) ? resident : arriving).push_back(has[unit]);
    }
    REQUIRE(out.resident.List(r) == resident);
    REQUIRE(out.arriving.List(r) == arriving);
  }
  kept = selected;
  for (int32_t unit = last + 1; unit <= last + c.ahead; ++unit) {
    kept.insert(unit);
    REQUIRE(has.contains(unit));
    if (!had.contains(unit)) REQUIRE(after[static_cast<size_t>(has[unit])].stamp == unit);
  }
  // No unit has a place that neither had one nor was asked for; nothing else has changed.
  std::pair<int32_t, int32_t> newest_evicted = {-1, -1};
  std::pair<int32_t, int32_t> oldest_left = {std::numeric_limits<int32_t>::max(), 0};
  for (const auto& [unit, place] : has) {
    if (!had.contains(unit)) REQUIRE(kept.contains(unit));
    if (!had.contains(unit) || kept.contains(unit)) continue;
    const World::Place& same = before[static_cast<size_t>(place)];
    REQUIRE(after[static_cast<size_t>(place)] == same);
    oldest_left = std::min(oldest_left, {same.stamp, place});
  }
  bool evicted = false, free_left = false;
  for (const auto& [unit, place] : had) {
    if (has.contains(unit)) continue;
    REQUIRE_FALSE(kept.contains(unit));
    evicted = true;
    newest_evicted = std::max(newest_evicted, {before[static_cast<size_t>(place)].stamp, place});
  }
  for (const World::Place& place : after) free_left |= place.unit == -1;
  if (evicted) {
    REQUIRE_FALSE(free_left);
    REQUIRE(newest_evicted < oldest_left);
  }
  // The moves are the units that had no place, in order, from their positions to their places.
  std::vector<int32_t> sources, targets;
  for (int32_t unit : selected) {
    if (had.contains(unit)) continue;
    sources.push_back(static_cast<int32_t>(EntryIndex(w.home.view, slot, unit)));
    targets.push_back(static_cast<int32_t>(EntryIndex(w.pool.view, slot, has[unit])));
  }
  const int32_t* source = out.source_units.data() + first * w.move_capacity;
  const int32_t* target = out.target_units.data() + first * w.move_capacity;
  REQUIRE(std::vector(source, source + out.move_counts[first]) == sources);
  REQUIRE(std::vector(target, target + out.move_counts[first]) == targets);
  for (int64_t r = first + 1; r < first + count; ++r) REQUIRE(out.move_counts[r] == 0);
  const SparseCounters& counters = w.counters[slot];
  const int64_t moved = std::ssize(sources), on = c.counters && !c.speculative ? 1 : 0;
  REQUIRE(counters.steps == counters_before.steps + on);
  REQUIRE(counters.selected == counters_before.selected + on * units);
  REQUIRE(counters.missing == counters_before.missing + on * moved);
  REQUIRE(counters.recalled == counters_before.recalled + (c.counters ? moved : 0));
}

// A cache that knows nothing of tables: the units of one sequence. The unit used longest ago goes
// first, among those that are neither selected nor made ahead.
class NaiveLru {
 public:
  explicit NaiveLru(int32_t places) : places_(static_cast<size_t>(places)) {}

  // Takes the union of the rows' selections; `last` is the last position. Returns how many units
  // had to come.
  int64_t Use(const std::set<int32_t>& selected, int32_t last, int32_t ahead, bool forget) {
    if (forget) held_.clear();
    std::set<int32_t> pinned = selected, coming;
    for (int32_t unit = last + 1; unit <= last + ahead; ++unit) pinned.insert(unit);
    for (const int32_t unit : pinned) {
      if (!held_.contains(unit)) coming.insert(unit);
    }
    for (const int32_t unit : selected) held_[unit].stamp = last;
    for (const int32_t unit : coming) held_[unit].stamp = std::max(unit, last);
    while (held_.size() > places_) {
      auto oldest = held_.end();
      for (auto it = held_.begin(); it != held_.end(); ++it) {
        if (pinned.contains(it->first)) continue;
        if (oldest == held_.end() || it->second < oldest->second) oldest = it;
      }
      REQUIRE(oldest != held_.end());
      held_.erase(oldest);
    }
    return std::count_if(coming.begin(), coming.end(),
                         [&](int32_t unit) { return selected.contains(unit); });
  }

  // Checks that the same units are in the table; equals go by the places that they have there.
  void Match(const std::vector<World::Place>& table) {
    size_t units = 0;
    for (size_t p = 0; p < table.size(); ++p) {
      if (table[p].unit < 0) continue;
      ++units;
      const auto held = held_.find(table[p].unit);
      REQUIRE(held != held_.end());
      REQUIRE(held->second.stamp == table[p].stamp);
      held->second.place = static_cast<int32_t>(p);
    }
    REQUIRE(units == held_.size());
  }

 private:
  struct Held {
    int32_t stamp = -1, place = -1;
    auto operator<=>(const Held&) const = default;
  };
  size_t places_;
  std::map<int32_t, Held> held_;  // keyed by unit
};

// Makes the rows of a step: some slots, each with some rows, padded rows between.
class Traffic {
 public:
  Traffic(const UpdateCase& c, Random& random) : case_(c), random_(random) {
    for (int32_t slot = 0; slot < kSlots; ++slot) Restart(slot);
  }

  StepInput Step() {
    struct Row {
      int32_t slot, position;
    };
    std::vector<Row> rows;
    std::vector<int32_t> order = {0, 1, 2, 3};
    std::shuffle(order.begin(), order.end(), random_);
    for (int32_t slot : order) {
      if (Below(4) == 0) rows.push_back({-1, Below(100)});
      if (Below(5) == 0) continue;
      const int32_t count = 1 + Below(case_.max_rows);
      int32_t& next = next_[static_cast<size_t>(slot)];
      for (int32_t i = 0; i < count; ++i) rows.push_back({slot, next + i});
      // Rejected positions are fed again.
      next += 1 + Below(count);
    }
    StepInput in(std::ssize(rows), case_.max_selected);
    for (size_t r = 0; r < rows.size(); ++r) {
      const auto row = static_cast<int64_t>(r);
      in.slots[row] = rows[r].slot;
      in.positions[row] = rows[r].position;
      in.selected.Put(row, Select(rows[r].slot, rows[r].position));
    }
    return in;
  }

  // Returns whether the slot's sequence must end before another step.
  bool Full(int32_t slot) const {
    return next_[static_cast<size_t>(slot)] + 2 * kMaxQueryPositions + case_.ahead >= kMaxTokens;
  }
  int32_t next(int32_t slot) const { return next_[static_cast<size_t>(slot)]; }
  void Restart(int32_t slot) { next_[static_cast<size_t>(slot)] = Below(400); }
  int32_t Below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint64_t>(n)); }

 private:
  // Selects the newest units, some of an old region that drifts, and some anywhere.
  std::vector<int32_t> Select(int32_t slot, int32_t position) {
    std::set<int32_t> units;
    if (slot < 0) return {};
    const int32_t count = Below(8) == 0 ? Below(3) : 1 + Below(case_.max_selected);
    const int32_t region = position / 40 * 7 % (position + 1);
    for (int32_t i = 0; i < 6 * count && std::ssize(units) < count; ++i) {
      const int32_t at = i % 3 == 0 ? position - Below(20) : region + Below(60);
      units.insert(i % 7 == 6 ? Below(position + 1) : std::clamp(at, 0, position));
    }
    return {units.begin(), units.end()};
  }

  const UpdateCase& case_;
  Random& random_;
  std::vector<int32_t> next_ = std::vector<int32_t>(kSlots, 0);
};

void TestUpdate(const KernelTable& table, Random& random) {
  for (const UpdateCase& c : kCases) {
    INFO(c.name);
    const uint64_t seed = random();
    World world(c, seed), reference(c, seed);
    Traffic traffic(c, random);
    std::vector<NaiveLru> naive(kSlots, NaiveLru(world.places));
    for (int step = 0; step < 150; ++step) {
      INFO("step " << step);
      for (int32_t slot = 0; slot < kSlots; ++slot) {
        if (!traffic.Full(slot) && traffic.Below(50) != 0) continue;
        traffic.Restart(slot);
        const int32_t places = world.places - traffic.Below(c.spare + 1);
        world.Begin(slot, places);
        reference.Begin(slot, places);
        naive[static_cast<size_t>(slot)] = NaiveLru(places);
      }
      const StepInput in = traffic.Step();
      const int64_t rows = in.slots.size();
      std::map<int32_t, std::vector<World::Place>> before;
      std::map<int32_t, SparseCounters> counters;
      for (int32_t slot = 0; slot < kSlots; ++slot) {
        before[slot] = world.Places(slot);
        counters[slot] = world.counters[slot];
      }
      StepOutput got(rows, c.max_selected, world.move_capacity);
      StepOutput want(rows, c.max_selected, world.move_capacity);
      world.UpdateResidency(table, in, got, 1 + step % 5);
      reference.UpdateResidency(Reference(), in, want, 1);
      for (int64_t r = 0, count = 1; r < rows; r += count) {
        count = 1;
        if (in.slots[r] < 0) {
          REQUIRE(got.resident.counts[r] + got.arriving.counts[r] + got.move_counts[r] == 0);
          continue;
        }
        while (r + count < rows && in.slots[r + count] == in.slots[r]) ++count;
        INFO("slot " << in.slots[r] << ", " << count << " rows");
        CheckSequence(c, world, before[in.slots[r]], counters[in.slots[r]], in, got, r, count);
        std::set<int32_t> selected;
        for (int64_t i = r; i < r + count; ++i) {
          for (const int32_t unit : in.selected.List(i)) selected.insert(unit);
        }
        NaiveLru& pool = naive[static_cast<size_t>(in.slots[r])];
        const int32_t last = in.positions[r + count - 1];
        REQUIRE(pool.Use(selected, last, c.ahead, c.forget) == got.move_counts[r]);
        pool.Match(world.Places(in.slots[r]));
      }
      for (int32_t slot = 0; slot < kSlots; ++slot) {
        REQUIRE(world.Places(slot) == reference.Places(slot));
        REQUIRE(world.PlaceOf(slot) == reference.PlaceOf(slot));
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH(
    "a residency update keeps what is selected and evicts what was used longest ago", TestUpdate)

// The sequence runs beside others that are not whole, and the tables are as if `whole` had not been
// given.
void TestWhole(const KernelTable& table, Random& random) {
  for (const int32_t selected : {30, 300}) {
    const UpdateCase c = {"whole", 3, selected, 3, kMaxTokens, false, true};
    const uint64_t seed = random();
    World world(c, seed), reference(c, seed);
    Traffic traffic(c, random);
    const auto begin = [&](int32_t slot) {
      for (World* w : {&world, &reference}) {
        if (slot % 2 == 0) w->BeginWhole(slot, traffic.next(slot) + c.max_rows);
        if (slot % 2 == 1) w->Begin(slot, w->places);
      }
      reference.whole[slot] = 0;
    };
    for (int32_t slot = 0; slot < kSlots; ++slot) begin(slot);
    for (int step = 0; step < 150; ++step) {
      INFO(selected << " selected, step " << step);
      for (int32_t slot = 0; slot < kSlots; ++slot) {
        if (!traffic.Full(slot) && traffic.Below(50) != 0) continue;
        traffic.Restart(slot);
        begin(slot);
      }
      const StepInput in = traffic.Step();
      const int64_t rows = in.slots.size();
      StepOutput got(rows, c.max_selected, world.move_capacity);
      StepOutput want(rows, c.max_selected, world.move_capacity);
      world.UpdateResidency(table, in, got, 1 + step % 5);
      reference.UpdateResidency(Reference(), in, want, 1);
      for (int64_t r = 0; r < rows; ++r) {
        INFO("row " << r << " of slot " << in.slots[r]);
        REQUIRE(got.resident.List(r) == want.resident.List(r));
        REQUIRE(got.arriving.List(r) == want.arriving.List(r));
        REQUIRE(got.move_counts[r] == want.move_counts[r]);
        if (in.slots[r] < 0 || in.slots[r] % 2 == 1) continue;
        REQUIRE(got.resident.List(r) == in.selected.List(r));
      }
      for (int32_t slot = 0; slot < kSlots; ++slot) {
        INFO("slot " << slot);
        REQUIRE(world.PlaceOf(slot) == reference.PlaceOf(slot));
        const std::vector<World::Place> places = world.Places(slot), same = reference.Places(slot);
        for (size_t p = 0; p < places.size(); ++p) {
          REQUIRE(places[p].unit == same[p].unit);
          if (slot % 2 == 1) REQUIRE(places[p].stamp == same[p].stamp);
        }
        REQUIRE(world.counters[slot].steps == reference.counters[slot].steps);
        REQUIRE(world.counters[slot].selected == reference.counters[slot].selected);
        REQUIRE(world.counters[slot].missing == reference.counters[slot].missing);
        REQUIRE(world.counters[slot].recalled == reference.counters[slot].recalled);
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("a residency update lists what whole sequences have selected", TestWhole)

}  // namespace
}  // namespace sluice::kernels
