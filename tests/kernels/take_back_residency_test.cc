// UpdateResidency with rows in turn, and TakeBackResidency behind it, under random traffic:
// sequences bring rows of drafts, and some of them are refuted. After a step's refuted rows are
// undone, tables, lists and the entries that lie in places are those of sequences that never
// drafted.
#include <map>
#include <set>

#include "tests/kernels/latent_support.h"

namespace sluice::kernels {
namespace {

constexpr int32_t kSlots = 3, kMaxTokens = 512, kBlockTokens = 16;

struct DraftCase {
  const char* name;
  int32_t rows;  // most rows of a sequence
  int32_t max_selected;
  int32_t spare;  // places beyond what the rows need
  bool whole = false;
};

const DraftCase kCases[] = {
    {"one row, just enough places", 1, 30, 0},   {"two rows, just enough places", 2, 30, 0},
    {"four rows, just enough places", 4, 20, 0}, {"four rows, spare places", 4, 24, 60},
    {"seven rows, few selected", 7, 5, 11},      {"whole sequences", 4, 24, kMaxTokens, true},
};

// One row of a step, and whether it counts.
struct DraftRow {
  int32_t slot, position;
  bool counts;
  std::vector<int32_t> selected;
};

// Holds a row's lists.
struct RowLists {
  std::vector<int32_t> resident, arriving;
  bool operator==(const RowLists&) const = default;
};

// The pools of all slots on one kernel path, and what lies in their places.
class Pools {
 public:
  Pools(const DraftCase& c, uint64_t seed)
      : case_(c),
        random_(seed),
        places_(c.rows * (c.max_selected + 1) + 1 + c.spare),
        capacity_(c.max_selected + 1),
        home_(kSlots, kMaxTokens, kBlockTokens, 2, 2, DType::kFloat32, random_),
        pool_(kSlots, places_, 32, 2, 2, DType::kFloat32, random_),
        place_of_(kSlots, kMaxTokens, 7, 1, 1, random_),
        table_(kSlots, places_, 5, 2, 1, random_),
        whole_(kSlots),
        last_(kSlots),
        undone_(kSlots),
        move_counts_(int64_t{kSlots} * c.rows),
        journal_counts_(int64_t{kSlots} * c.rows),
        journal_(3 * ListWords()) {
    for (int32_t slot = 0; slot < kSlots; ++slot) Begin(slot, 0, places_);
  }

  // Puts a sequence of `tokens` tokens that has the first `had` places into the slot. If it is
  // whole, each token has a place.
  void Begin(int32_t slot, int32_t tokens, int32_t had) {
    const int32_t taken = case_.whole ? tokens + 1 : 0;
    whole_[slot] = case_.whole ? 1 : 0;
    last_[slot] = undone_[slot] = 0;
    held_[slot].clear();
    for (int32_t u = 0; u < kMaxTokens; ++u) *place_of_.Row(slot, u, 0) = u < taken ? u : -1;
    for (int32_t p = 0; p < places_; ++p) {
      table_.Row(slot, p, 0)[0] = p < taken ? p : p < had ? -1 : kNoPlace;
      table_.Row(slot, p, 0)[1] = p < taken ? p : -1;
      if (p < taken) held_[slot][p] = p;
    }
  }
  int32_t places() const { return places_; }

  // Updates the rows, `in_turn` or as they are, and returns each row's lists. Entries then lie
  // where the moves bring them, and those of the rows' positions where they have their places.
  std::vector<RowLists> Update(const KernelTable& path, const std::vector<DraftRow>& rows,
                               bool in_turn, int workers) {
    const auto count = std::ssize(rows);
    Guarded<int32_t> slots(count), positions(count), sources(count * case_.max_selected),
        targets(count * case_.max_selected), moves(count);
    TestLists selected(count, case_.max_selected), resident(count, case_.max_selected),
        arriving(count, case_.max_selected);
    for (int64_t r = 0; r < count; ++r) {
      slots[r] = rows[static_cast<size_t>(r)].slot;
      positions[r] = rows[static_cast<size_t>(r)].position;
      selected.Put(r, rows[static_cast<size_t>(r)].selected);
    }
    UpdateResidencyParams p{};
    p.residency = {place_of_.view, table_.view, 0, places_};
    p.slots = slots.data();
    p.positions = positions.data();
    p.selected = selected.view;
    p.resident = resident.units.data();
    p.resident_counts = resident.counts.data();
    p.arriving = arriving.units.data();
    p.arriving_counts = arriving.counts.data();
    p.home = home_.view;
    p.pool = pool_.view;
    p.source_units = sources.data();
    p.target_units = targets.data();
    p.move_counts = moves.data();
    p.move_capacity = case_.max_selected;
    p.rows = static_cast<int32_t>(count);
    p.ahead = 1;
    p.whole = whole_.data();
    p.in_turn = in_turn;
    if (in_turn) p.journal = Journal();
    workers < 3 ? RunWorkers(path.update_residency, p, workers)
                : RunThreads(path.update_residency, p, workers);
    REQUIRE(resident.Damage() + arriving.Damage() + sources.Damage() + targets.Damage() +
                moves.Damage() + Damage() ==
            "");
    std::vector<RowLists> lists;
    for (int64_t r = 0; r < count; ++r) {
      lists.push_back({resident.List(r), arriving.List(r)});
      if (slots[r] < 0) continue;
      for (int64_t m = r * case_.max_selected; m < r * case_.max_selected + moves[r]; ++m) {
        Move(slots[r], sources[m], targets[m]);
      }
      held_[slots[r]][*place_of_.Row(slots[r], positions[r], 0)] = positions[r];
      last_[slots[r]] = positions[r];
    }
    return lists;
  }

  // Undoes the last `rows[slot]` rows of each slot.
  void TakeBack(const KernelTable& path, const std::vector<int32_t>& rows, int workers) {
    for (int32_t slot = 0; slot < kSlots; ++slot) undone_[slot] = rows[static_cast<size_t>(slot)];
    TakeBackResidencyParams p{};
    p.residency = {place_of_.view, table_.view, 0, places_};
    p.last = last_.data();
    p.rows = undone_.data();
    p.journal = Journal();
    p.home = home_.view;
    p.pool = pool_.view;
    p.move_counts = move_counts_.data();
    p.slots = kSlots;
    RunWorkers(path.take_back_residency, p, workers);
    REQUIRE(Damage() == "");
    for (int64_t list = 0; list < int64_t{kSlots} * case_.rows; ++list) {
      const auto slot = static_cast<int32_t>(list / case_.rows);
      for (int64_t m = list * capacity_; m < list * capacity_ + move_counts_[list]; ++m) {
        const int32_t source = p.journal.units[m], target = p.journal.places[m];
        REQUIRE((source < 0) == (target < 0));
        if (source >= 0) Move(slot, source, target);
      }
    }
  }

  struct Place {
    int32_t unit, stamp;
    bool operator==(const Place&) const = default;
  };
  std::vector<Place> Places(int32_t slot) {
    std::vector<Place> all;
    for (int32_t p = 0; p < places_; ++p) {
      const int32_t* row = table_.Row(slot, p, 0);
      all.push_back({row[0], row[0] < 0 || case_.whole ? 0 : row[1]});
    }
    return all;
  }
  std::vector<int32_t> PlaceOf(int32_t slot) {
    std::vector<int32_t> all;
    for (int32_t u = 0; u < kMaxTokens; ++u) all.push_back(*place_of_.Row(slot, u, 0));
    return all;
  }
  // Returns whether the entries of all units that have a place, up to the position `last`, lie in
  // their places. (The place behind is reserved for the next entry.)
  bool HoldsEntries(int32_t slot, int32_t last) {
    for (int32_t u = 0; u <= last; ++u) {
      const int32_t place = *place_of_.Row(slot, u, 0);
      if (place >= 0 && held_[slot][place] != u) return false;
    }
    return true;
  }

 private:
  int64_t ListWords() const { return int64_t{kSlots} * case_.rows * capacity_; }
  ResidencyJournal Journal() {
    int32_t* const words = journal_.data();
    return {
        words,    words + ListWords(), words + 2 * ListWords(), journal_counts_.data(), case_.rows,
        capacity_};
  }
  std::string Damage() const {
    return place_of_.data.Damage() + table_.data.Damage() + whole_.Damage() + last_.Damage() +
           undone_.Damage() + move_counts_.Damage() + journal_counts_.Damage() + journal_.Damage();
  }
  void Move(int32_t slot, int32_t source, int32_t target) {
    int32_t unit = 0, place = 0;
    while (EntryIndex(home_.view, slot, unit) != source) REQUIRE(++unit < kMaxTokens);
    while (EntryIndex(pool_.view, slot, place) != target) REQUIRE(++place < places_);
    held_[slot][place] = unit;
  }

  const DraftCase case_;
  Random random_;
  const int32_t places_, capacity_;
  TestLatents home_, pool_;
  TestRows<int32_t> place_of_, table_;
  Guarded<int32_t> whole_, last_, undone_, move_counts_, journal_counts_, journal_;
  std::map<int32_t, std::map<int32_t, int32_t>> held_;  // by slot: which unit's entry a place has
};

// Draws the rows of steps: up to `rows` of a slot, of which the first counts, and those that are
// accepted.
class Drafts {
 public:
  Drafts(const DraftCase& c, Random& random) : case_(c), random_(random) {}

  std::vector<DraftRow> Step(std::vector<int32_t>* next) {
    std::vector<DraftRow> rows;
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      if (Below(5) == 0) rows.push_back({-1, Below(100), false, {}});
      if (Below(6) == 0) continue;
      const int32_t count = 1 + Below(case_.rows), good = 1 + Below(count);
      int32_t& position = (*next)[static_cast<size_t>(slot)];
      for (int32_t i = 0; i < count; ++i) {
        rows.push_back({slot, position + i, i < good, Select(position + i)});
      }
      position += good;
    }
    return rows;
  }
  int32_t Below(int32_t n) { return static_cast<int32_t>(random_() % static_cast<uint64_t>(n)); }

 private:
  // Selects the newest units, some of a region that drifts, and some anywhere. Now and then the
  // row's own position is not among them.
  std::vector<int32_t> Select(int32_t position) {
    std::set<int32_t> units;
    const int32_t count = Below(8) == 0 ? Below(3) : 1 + Below(case_.max_selected);
    if (Below(4) > 0 && count > 0) units.insert(position);
    const int32_t region = position / 30 * 11 % (position + 1);
    for (int32_t i = 0; i < 6 * count && std::ssize(units) < count; ++i) {
      const int32_t at = i % 3 == 0 ? position - Below(20) : region + Below(50);
      units.insert(i % 7 == 6 ? Below(position + 1) : std::clamp(at, 0, position));
    }
    return {units.begin(), units.end()};
  }

  const DraftCase& case_;
  Random& random_;
};

void TestTakeBack(const KernelTable& table, Random& random) {
  for (const DraftCase& c : kCases) {
    INFO(c.name);
    const uint64_t seed = random();
    Pools drafted(c, seed), plain(c, seed);
    Drafts drafts(c, random);
    std::vector<int32_t> next(kSlots, kMaxTokens);
    for (int step = 0; step < 120; ++step) {
      INFO("step " << step);
      for (int32_t slot = 0; slot < kSlots; ++slot) {
        int32_t& position = next[static_cast<size_t>(slot)];
        if (position + 2 * c.rows < kMaxTokens && drafts.Below(40) != 0) continue;
        position = drafts.Below(300);
        const int32_t had = drafted.places() - drafts.Below(c.whole ? 1 : c.spare + 1);
        for (Pools* pools : {&drafted, &plain}) pools->Begin(slot, position, had);
      }
      const std::vector<int32_t> before = next;
      const std::vector<DraftRow> rows = drafts.Step(&next);
      const std::vector<RowLists> got = drafted.Update(table, rows, true, 1 + step % 4);
      std::vector<int32_t> refuted(kSlots, 0);
      for (size_t r = 0; r < rows.size(); ++r) {
        if (rows[r].slot < 0) {
          REQUIRE(got[r] == RowLists{});
        } else if (rows[r].counts) {
          INFO("slot " << rows[r].slot << ", position " << rows[r].position);
          REQUIRE(got[r] == plain.Update(Reference(), {rows[r]}, false, 1)[0]);
        } else if (!c.whole) {
          ++refuted[static_cast<size_t>(rows[r].slot)];
        }
      }
      drafted.TakeBack(table, refuted, 1 + step % 3);
      for (int32_t slot = 0; slot < kSlots; ++slot) {
        INFO("slot " << slot);
        REQUIRE(drafted.HoldsEntries(slot, next[static_cast<size_t>(slot)] - 1));
        // A whole sequence's next places may be reserved already.
        if (c.whole) continue;
        REQUIRE(drafted.Places(slot) == plain.Places(slot));
        REQUIRE(drafted.PlaceOf(slot) == plain.PlaceOf(slot));
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("pools whose drafts were refuted are those of sequences without drafts",
                          TestTakeBack)

}  // namespace
}  // namespace sluice::kernels
