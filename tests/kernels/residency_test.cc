// Residency under random traffic: sequences grow, end and begin anew; units are selected, split and
// recalled, and the recalled units are copied. After every step the tables must be sound and agree
// with the reference's to the last entry, and every place must hold the bytes of its unit.
#include <map>
#include <set>

#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

struct ResidencyCase {
  const char* name;
  int32_t unit_tokens;
  int32_t ring;   // units
  int32_t count;  // places, the ring's included
  int32_t max_selected;
  bool whole;
  bool every_row;  // `due` is null
};

constexpr int32_t kSlots = 4, kKvHeads = 2, kBlockTokens = 16, kHeadDim = 16, kMaxBlocks = 24;
constexpr int32_t kMaxTokens = kMaxBlocks * kBlockTokens;
constexpr int32_t kRows = 6;  // rows, some of them padded

const ResidencyCase kCases[] = {
    {"blocks", kBlockTokens, 2, 8, 7, false, false},
    {"blocks, whole", kBlockTokens, 1, 7, 9, true, false},
    {"blocks, places for a few", kBlockTokens, 1, 3, 9, false, true},
    {"blocks, no places", kBlockTokens, 2, 2, 5, false, true},
    {"tokens", 1, 2 * kBlockTokens, 5 * kBlockTokens, 40, false, true},
    {"tokens, many places", 1, kBlockTokens, 6 * kBlockTokens, 70, false, true},
    {"tokens, whole", 1, kBlockTokens, 4 * kBlockTokens, 60, true, false},
};

// One step's rows and the units selected for each.
struct StepInput {
  Guarded<int32_t> slots{kRows}, positions{kRows}, due{kRows};
  TestLists selected{kRows * kKvHeads, kMaxTokens};
};

struct StepOutput {
  explicit StepOutput(int32_t resident_capacity)
      : resident(kRows * kKvHeads, resident_capacity), places(resident.units.size()) {}

  TestLists resident;
  Guarded<int32_t> places;
  TestLists missing{kRows * kKvHeads, kMaxTokens};
  Guarded<int32_t> source_units{kRows * kKvHeads * kMaxTokens};
  Guarded<int32_t> target_units{kRows * kKvHeads * kMaxTokens};
  Guarded<int32_t> move_counts{kRows * kKvHeads};

  std::string Damage() const {
    return resident.Damage() + places.Damage() + missing.Damage() + source_units.Damage() +
           target_units.Damage() + move_counts.Damage();
  }
};

// The tables and caches that one kernel path works on. Two that are made from one seed are alike.
class World {
 public:
  World(const ResidencyCase& test_case, uint64_t seed)
      : c(test_case),
        random_(seed),
        home(kSlots, kMaxBlocks, kBlockTokens, kKvHeads, kHeadDim, random_),
        hbm(kSlots, (c.count * c.unit_tokens + kBlockTokens - 1) / kBlockTokens, kBlockTokens,
            kKvHeads, kHeadDim, random_),
        place_of(kSlots, kMaxTokens / c.unit_tokens, 7, 1, kKvHeads, random_),
        places(kSlots, c.count, 5, 2, kKvHeads, random_),
        counters(kSlots) {
    home.Fill(random_);
    for (int32_t slot = 0; slot < kSlots; ++slot) Begin(slot, c.count);
  }

  // Puts a sequence that has the first `count` places into the slot.
  void Begin(int32_t slot, int32_t count) {
    counters[slot] = {};
    for (int32_t h = 0; h < kKvHeads; ++h) {
      for (int32_t u = 0; u < kMaxTokens / c.unit_tokens; ++u) *place_of.Row(slot, u, h) = -1;
      for (int32_t p = c.ring; p < c.count; ++p) {
        int32_t* row = places.Row(slot, p, h);
        row[0] = p < count ? -1 : kNoPlace;
        row[1] = -1;
      }
    }
  }

  ResidencyTable table() { return {place_of.view, places.view, c.ring, c.count}; }

  void Split(const KernelTable& path, const StepInput& in, StepOutput& out, int workers) {
    const SplitParams p = {.residency = table(),
                           .slots = in.slots.data(),
                           .positions = in.positions.data(),
                           .selected = in.selected.view,
                           .resident = out.resident.view,
                           .places = out.places.data(),
                           .missing = out.missing.view,
                           .rows = kRows,
                           .kv_heads = kKvHeads,
                           .unit_tokens = c.unit_tokens,
                           .whole = c.whole};
    RunWorkers(path.split, p, workers);
  }

  void Recall(const KernelTable& path, const StepInput& in, StepOutput& out, int workers) {
    const RecallParams p = {.residency = table(),
                            .slots = in.slots.data(),
                            .positions = in.positions.data(),
                            .missing = out.missing.view,
                            .due = c.every_row ? nullptr : in.due.data(),
                            .home = home.view,
                            .resident = hbm.view,
                            .source_units = out.source_units.data(),
                            .target_units = out.target_units.data(),
                            .move_counts = out.move_counts.data(),
                            .counters = counters.data(),
                            .rows = kRows,
                            .kv_heads = kKvHeads,
                            .unit_tokens = c.unit_tokens};
    workers < 4 ? RunWorkers(path.recall, p, workers) : RunThreads(path.recall, p, workers);
    Move(path, out);
  }

  std::string Damage() const {
    return home.data.Damage() + hbm.data.Damage() + place_of.data.Damage() + places.data.Damage() +
           counters.Damage();
  }

  const ResidencyCase c;

 private:
  // Makes the copies that Recall asks for, as policies do: blocks at once, tokens K then V.
  void Move(const KernelTable& path, StepOutput& out) {
    const int32_t row_bytes = kHeadDim * 2, half = kBlockTokens * row_bytes;
    const bool tokens = c.unit_tokens == 1;
    for (int part = 0; part < (tokens ? 2 : 1); ++part) {
      const int32_t bytes = tokens ? row_bytes : 2 * half;
      TransferParams p = {};
      p.source = reinterpret_cast<char*>(home.data.data()) + part * half;
      p.target = reinterpret_cast<char*>(hbm.data.data()) + part * half;
      p.source_pitch = p.target_pitch = p.unit_bytes = bytes;
      p.source_units = out.source_units.data();
      p.target_units = out.target_units.data();
      p.counts = out.move_counts.data();
      p.lists = kRows * kKvHeads;
      p.capacity = kMaxTokens;
      RunWorkers(path.transfer, p, 2);
    }
  }

  Random random_;

 public:
  TestCache<uint16_t> home, hbm;
  TestRows<int32_t> place_of, places;
  Guarded<SparseCounters> counters;
};

// Returns the units that have a place, by place, of one (slot, head).
using Held = std::map<int32_t, int32_t>;

// Returns what is wrong with the tables of (slot, head), or nothing; `newest` is the sequence's
// newest unit.
std::string Unsound(World& w, int32_t slot, int32_t head, int32_t newest, Held* held) {
  held->clear();
  for (int32_t p = w.c.ring; p < w.c.count; ++p) {
    const int32_t unit = w.places.Row(slot, p, head)[0];
    if (unit < 0) continue;
    (*held)[p] = unit;
    if (unit > newest - w.c.ring) return "a unit of the ring has a place in the tables";
    if (*w.place_of.Row(slot, unit, head) != p) return "place_of is not the inverse of places";
  }
  std::set<int32_t> units;
  for (const auto& [place, unit] : *held) units.insert(unit);
  if (units.size() != held->size()) return "a unit has two places";
  size_t with_place = 0;
  for (int32_t u = 0; u < kMaxTokens / w.c.unit_tokens; ++u) {
    const int32_t place = *w.place_of.Row(slot, u, head);
    if (place < -1) return "place_of has neither a place nor -1";
    if (place < 0) continue;
    ++with_place;
    if (held->find(place) == held->end() || held->at(place) != u) {
      return "places is not the inverse of place_of";
    }
  }
  if (with_place != held->size()) return "place_of and places differ in number";
  for (int32_t p = 0; p < w.c.ring; ++p) {
    if (w.places.Row(slot, p, head)[0] != -1) return "a row of the ring was used";  // as allocated
  }
  for (const auto& [place, unit] : *held) {
    for (int32_t t = 0; t < w.c.unit_tokens; ++t) {
      const uint16_t* want = w.home.Key(slot, int64_t{unit} * w.c.unit_tokens + t, head);
      const uint16_t* got = w.hbm.Key(slot, int64_t{place} * w.c.unit_tokens + t, head);
      for (int64_t v : {int64_t{0}, int64_t{kBlockTokens} * kHeadDim}) {
        if (!std::equal(want + v, want + v + kHeadDim, got + v)) return "a place has other bytes";
      }
    }
  }
  return "";
}

// Makes random rows of different slots, padding between, and lists that overlap from step to step.
StepInput RandomStep(const ResidencyCase& c, const std::vector<int32_t>& positions,
                     Random& random) {
  StepInput in;
  std::vector<int32_t> slots = {0, 1, 2, 3, -1, -1};
  std::shuffle(slots.begin(), slots.end(), random);
  for (int32_t r = 0; r < kRows; ++r) {
    in.slots[r] = slots[static_cast<size_t>(r)];
    in.positions[r] = in.slots[r] < 0 ? 5 : positions[static_cast<size_t>(in.slots[r])];
    in.due[r] = random() % 3 == 0 ? 1 : 0;
    const int32_t newest = in.positions[r] / c.unit_tokens;
    for (int64_t list = r * kKvHeads; list < (r + 1) * kKvHeads; ++list) {
      if (in.slots[r] < 0) continue;  // stays -1 everywhere: not to be read
      std::set<int32_t> units = {newest};
      // Now and then a whole stretch is selected, so that there is more than there are places.
      const int32_t wanted = static_cast<int32_t>(random() % static_cast<uint64_t>(c.max_selected));
      const bool stretch = random() % 4 == 0;
      const int32_t first = static_cast<int32_t>(random() % static_cast<uint64_t>(newest + 1));
      for (int32_t i = 0; i < wanted; ++i) {
        const int32_t any = static_cast<int32_t>(random() % static_cast<uint64_t>(newest + 1));
        units.insert(stretch ? std::min(first + i, newest) : std::min(any, newest));
      }
      if (random() % 16 == 0) units.clear();
      in.selected.Put(list, {units.begin(), units.end()});
    }
  }
  return in;
}

// Returns the index of (unit or place) `at` of a cache, as RecallParams has it.
int32_t PieceOf(const TestCache<uint16_t>& cache, int32_t unit_tokens, int32_t slot, int32_t head,
                int32_t at) {
  const int32_t block = at * unit_tokens / kBlockTokens, offset = at * unit_tokens % kBlockTokens;
  const int32_t piece = cache.table[slot * cache.view.table_stride + block] * kKvHeads + head;
  return unit_tokens == 1 ? piece * 2 * kBlockTokens + offset : piece;
}

// Checks what Split said of one list against the tables as they were before.
void CheckSplit(World& w, const StepInput& in, const StepOutput& out, int64_t list,
                const Held& before) {
  const int32_t newest = in.positions[list / kKvHeads] / w.c.unit_tokens;
  std::map<int32_t, int32_t> place_of_unit;
  for (const auto& [place, unit] : before) place_of_unit[unit] = place;
  for (int32_t u = std::max(0, newest - w.c.ring + 1); u <= newest; ++u) {
    place_of_unit[u] = u % w.c.ring;
  }
  std::vector<int32_t> resident, places, missing;
  for (int32_t unit : in.selected.List(list)) {
    if (place_of_unit.count(unit) == 0) missing.push_back(unit);
    if (place_of_unit.count(unit) == 1 && !w.c.whole) resident.push_back(unit);
  }
  if (w.c.whole) {
    for (const auto& [unit, place] : place_of_unit) resident.push_back(unit);
  }
  for (int32_t unit : resident) places.push_back(place_of_unit[unit]);
  REQUIRE(out.resident.List(list) == resident);
  REQUIRE(out.missing.List(list) == missing);
  const int32_t* got = out.places.data() + list * out.resident.view.capacity;
  REQUIRE(std::vector<int32_t>(got, got + places.size()) == places);
}

// Checks what Recall did to one list's tables: `before` and `after`.
void CheckRecall(World& w, const StepInput& in, const StepOutput& out, int64_t list,
                 const Held& before, const Held& after, const std::map<int32_t, int32_t>& stamps) {
  const int64_t r = list / kKvHeads;
  const int32_t slot = in.slots[r], head = static_cast<int32_t>(list % kKvHeads);
  const std::vector<int32_t> missing = out.missing.List(list);
  const bool due = w.c.every_row || in.due[r] != 0;
  // The places that could be given: free, or not stamped in this step.
  int32_t available = 0;
  for (int32_t p = w.c.ring; p < w.c.count; ++p) {
    if (w.places.Row(slot, p, head)[0] == kNoPlace) continue;
    available += before.count(p) == 0 || stamps.at(p) != in.positions[r] ? 1 : 0;
  }
  const size_t moved = due ? std::min(missing.size(), static_cast<size_t>(available)) : 0;
  REQUIRE(static_cast<size_t>(out.move_counts[list]) == moved);
  std::map<int32_t, int32_t> place_of_unit;
  for (const auto& [place, unit] : after) place_of_unit[unit] = place;
  std::set<int32_t> taken;
  for (size_t i = 0; i < moved; ++i) {  // the first ones went, in their order, to their new places
    REQUIRE(place_of_unit.count(missing[i]) == 1);
    const int32_t place = place_of_unit[missing[i]];
    taken.insert(place);
    const int64_t move = list * kMaxTokens + static_cast<int64_t>(i);
    REQUIRE(out.source_units[move] == PieceOf(w.home, w.c.unit_tokens, slot, head, missing[i]));
    REQUIRE(out.target_units[move] == PieceOf(w.hbm, w.c.unit_tokens, slot, head, place));
  }
  int32_t last_evicted = -2, first_kept = kMaxTokens;  // positions
  for (const auto& [place, unit] : before) {
    if (taken.count(place) == 1) {
      REQUIRE(stamps.at(place) != in.positions[r]);
      last_evicted = std::max(last_evicted, stamps.at(place));
    } else {  // nothing else has moved
      REQUIRE(after.count(place) == 1);
      REQUIRE(after.at(place) == unit);
      first_kept = std::min(first_kept, stamps.at(place));
    }
  }
  REQUIRE(last_evicted <= first_kept);
  REQUIRE(after.size() == before.size() + moved - [&] {
    size_t evicted = 0;
    for (int32_t place : taken) evicted += before.count(place);
    return evicted;
  }());
}

template <typename T>
bool Same(const Guarded<T>& a, const Guarded<T>& b) {
  return std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size()) * sizeof(T)) == 0;
}

void RunTraffic(const KernelTable& table, const ResidencyCase& c, int steps, Random& random) {
  const uint64_t seed = random();
  World got(c, seed), want(c, seed);
  std::vector<int32_t> positions = {0, 40, 100, 7};
  int64_t recalled = 0;
  for (int step = 0; step < steps; ++step) {
    INFO(c.name << ", step " << step);
    const StepInput in = RandomStep(c, positions, random);
    StepOutput out(kMaxTokens), reference(kMaxTokens);
    std::vector<Held> before(kRows * kKvHeads), after(kRows * kKvHeads);
    const auto sound = [&](std::vector<Held>& held) {
      for (int64_t list = 0; list < kRows * kKvHeads; ++list) {
        const int32_t slot = in.slots[list / kKvHeads];
        if (slot < 0) continue;
        REQUIRE(Unsound(got, slot, static_cast<int32_t>(list % kKvHeads),
                        in.positions[list / kKvHeads] / c.unit_tokens,
                        &held[static_cast<size_t>(list)]) == "");
      }
    };
    sound(before);
    got.Split(table, in, out, 1 + step % 3);
    want.Split(Reference(), in, reference, 1);
    std::vector<std::map<int32_t, int32_t>> stamps(kRows * kKvHeads);
    for (int64_t list = 0; list < kRows * kKvHeads; ++list) {
      const int32_t slot = in.slots[list / kKvHeads];
      const size_t at = static_cast<size_t>(list);
      if (slot < 0) {
        REQUIRE(out.resident.counts[list] == 0);
        REQUIRE(out.missing.counts[list] == 0);
        continue;
      }
      CheckSplit(got, in, out, list, before[at]);
      for (const auto& [place, unit] : before[at]) {
        stamps[at][place] = got.places.Row(slot, place, list % kKvHeads)[1];
        const std::vector<int32_t> selected = in.selected.List(list);
        const bool is_selected = std::binary_search(selected.begin(), selected.end(), unit);
        REQUIRE((stamps[at][place] == in.positions[list / kKvHeads]) == is_selected);
      }
    }
    got.Recall(table, in, out, 1 + step % 4);
    want.Recall(Reference(), in, reference, 1);
    sound(after);
    for (int64_t list = 0; list < kRows * kKvHeads; ++list) {
      const size_t at = static_cast<size_t>(list);
      if (in.slots[list / kKvHeads] < 0) {
        REQUIRE(out.move_counts[list] == 0);
      } else {
        CheckRecall(got, in, out, list, before[at], after[at], stamps[at]);
      }
      recalled += out.move_counts[list];
    }
    REQUIRE(out.Damage() + got.Damage() == "");
    REQUIRE(Same(got.place_of.data, want.place_of.data));
    REQUIRE(Same(got.places.data, want.places.data));
    REQUIRE(Same(got.hbm.data, want.hbm.data));
    REQUIRE(Same(got.counters, want.counters));
    for (size_t slot = 0; slot < kSlots; ++slot) {
      const bool ends = ++positions[slot] == kMaxTokens || random() % 200 == 0;
      if (!ends) continue;
      positions[slot] = static_cast<int32_t>(random() % (kMaxTokens - 50));
      const int32_t count =
          c.ring + static_cast<int32_t>(random() % static_cast<uint64_t>(c.count - c.ring + 1));
      got.Begin(static_cast<int32_t>(slot), count);
      want.Begin(static_cast<int32_t>(slot), count);
    }
  }
  CHECK((recalled > 0) == (c.count > c.ring));
}

void TestResidency(const KernelTable& table, Random& random) {
  for (const ResidencyCase& c : kCases) RunTraffic(table, c, 500, random);
}
SLUICE_TEST_ON_EVERY_PATH("residency tables stay sound under random traffic", TestResidency)
TEST_CASE("residency tables stay sound under random traffic (reference)", "[kernels]") {
  OnPath("reference", TestResidency);
}

}  // namespace
}  // namespace sluice::kernels
