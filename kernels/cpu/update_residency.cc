// UpdateResidency and TakeBackResidency for every path: a worker runs whole sequences.
#include "kernels/cpu/cpu_tables.h"
#include "kernels/cpu/place_heap.h"
#include "kernels/latent_layout.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int64_t kMaxPlaces = int64_t{1} << 20;

// A set of places of a sequence, one bit for each.
class PlaceSet {
 public:
  explicit PlaceSet(int64_t places) {
    for (int64_t i = 0; i < CeilDiv(places, 64); ++i) bits_[i] = 0;
  }
  void Add(int64_t place) { bits_[place / 64] |= uint64_t{1} << (place % 64); }
  bool Has(int64_t place) const { return (bits_[place / 64] >> (place % 64) & 1) != 0; }

 private:
  uint64_t bits_[kMaxPlaces / 64];
};

// Walks the units of up to four ascending lists, each unit once, ascending.
class Union {
 public:
  Union(const UnitLists& lists, int64_t first, int64_t count) : count_(count) {
    for (int64_t i = 0; i < count; ++i) {
      next_[i] = lists.units + (first + i) * lists.capacity;
      end_[i] = next_[i] + lists.counts[first + i];
    }
  }
  // Returns the next unit, or -1.
  int32_t Next() {
    int32_t unit = -1;
    for (int64_t i = 0; i < count_; ++i) {
      if (next_[i] != end_[i] && (unit < 0 || *next_[i] < unit)) unit = *next_[i];
    }
    for (int64_t i = 0; unit >= 0 && i < count_; ++i)
      next_[i] += next_[i] != end_[i] && *next_[i] == unit;
    return unit;
  }

 private:
  int64_t count_;
  const int32_t* next_[kMaxQueryPositions];
  const int32_t* end_[kMaxQueryPositions];
};

class SequenceUpdate {
 public:
  SequenceUpdate(const UpdateResidencyParams& p, int64_t first, int64_t count)
      : p_(p),
        t_(p.residency),
        first_(first),
        count_(count),
        slot_(p.slots[first]),
        last_(p.positions[first + count - 1]),
        kept_(p.residency.count),
        given_(p.residency.count),
        list_(Notes() ? slot_ * p.journal.rows + last_ % p.journal.rows : 0) {}

  void Run() {
    if (p_.forget) Forget();
    if (Notes()) p_.journal.counts[list_] = 0;
    const int32_t missing = Keep();
    if (missing > p_.move_capacity) KernelCheckFailed("update_residency: no room for the moves");
    GiveMissing(missing);
    for (int32_t unit = last_ + 1; unit <= last_ + p_.ahead; ++unit) {
      if (PlaceOf(unit) >= 0) continue;
      const int32_t place = OldestPlace();
      Give(unit, place, unit);
      given_.Add(place);
    }
    int64_t selected = 0;
    for (int64_t r = first_; r < first_ + count_; ++r) selected += List(r);
    if (p_.counters == nullptr) return;
    SparseCounters& counters = p_.counters[slot_];
    counters.recalled += missing;
    if (p_.speculative) return;
    counters.steps += 1;
    counters.selected += selected;
    counters.missing += missing;
  }

 private:
  int32_t& PlaceOf(int32_t unit) { return *TableRow(t_.place_of, slot_, unit); }
  int32_t* Place(int32_t place) { return TableRow(t_.places, slot_, place); }
  bool MayGive(int32_t place, const int32_t* row) const {
    return row[0] != kNoPlace && !kept_.Has(place);
  }

  bool Notes() const { return p_.in_turn && p_.journal.rows > 0; }
  // Notes what a place holds before it changes.
  void Note(int32_t place) {
    if (!Notes()) return;
    const ResidencyJournal& journal = p_.journal;
    if (journal.counts[list_] >= journal.capacity)
      KernelCheckFailed("update_residency: no room in the journal");
    const int64_t at = list_ * journal.capacity + journal.counts[list_]++;
    journal.places[at] = place;
    journal.units[at] = Place(place)[0];
    journal.stamps[at] = Place(place)[1];
  }

  void Forget() {
    for (int32_t place = 0; place < t_.count; ++place) {
      int32_t& unit = *Place(place);
      if (unit < 0) continue;
      PlaceOf(unit) = -1;
      unit = -1;
    }
  }

  // Stamps the places of selected units, and keeps them and the places that were made ahead.
  // Returns how many selected units have no place.
  int32_t Keep() {
    int32_t missing = 0;
    Union units(p_.selected, first_, count_);
    for (int32_t unit = units.Next(); unit >= 0; unit = units.Next()) {
      const int32_t place = PlaceOf(unit);
      if (place < 0) {
        ++missing;
        continue;
      }
      Note(place);
      Place(place)[1] = last_;
      kept_.Add(place);
    }
    for (int32_t unit = last_ + 1; unit <= last_ + p_.ahead; ++unit) {
      if (PlaceOf(unit) >= 0) kept_.Add(PlaceOf(unit));
    }
    return missing;
  }

  void Give(int32_t unit, int32_t place, int32_t stamp) {
    int32_t* row = Place(place);
    Note(place);
    if (row[0] >= 0) PlaceOf(row[0]) = -1;
    row[0] = unit;
    row[1] = stamp;
    PlaceOf(unit) = place;
  }

  void GiveMissing(int32_t missing) {
    p_.move_counts[first_] = missing;
    if (missing == 0) return;
    const int64_t moves = first_ * p_.move_capacity;
    PlaceHeap heap(p_.source_units + moves, p_.target_units + moves, missing);
    for (int32_t place = 0; place < t_.count; ++place) {
      const int32_t* row = Place(place);
      if (MayGive(place, row)) heap.Offer(row[0] < 0 ? PlaceHeap::kFree : row[1], place);
    }
    if (heap.count() < missing)
      KernelCheckFailed("update_residency: fewer places than selected units");
    heap.Sort();
    Union units(p_.selected, first_, count_);
    for (int64_t move = moves; move < moves + missing;) {
      const int32_t unit = units.Next();
      if (PlaceOf(unit) >= 0) continue;
      const int32_t place = p_.target_units[move];
      Give(unit, place, last_);
      given_.Add(place);
      p_.source_units[move] = static_cast<int32_t>(EntryIndex(p_.home, slot_, unit));
      p_.target_units[move] = static_cast<int32_t>(EntryIndex(p_.pool, slot_, place));
      ++move;
    }
  }

  // Returns the place to give next; it is none that this call has given.
  int32_t OldestPlace() {
    int32_t best = -1, least = 0;
    for (int32_t place = 0; place < t_.count; ++place) {
      const int32_t* row = Place(place);
      if (!MayGive(place, row) || given_.Has(place)) continue;
      const int32_t stamp = row[0] < 0 ? PlaceHeap::kFree : row[1];
      if (best >= 0 && stamp >= least) continue;
      best = place;
      least = stamp;
    }
    if (best < 0) KernelCheckFailed("update_residency: fewer places than selected units");
    return best;
  }

  // Lists row r's places, in two lists. Returns how many units it has selected.
  int64_t List(int64_t r) {
    const int64_t begin = r * p_.selected.capacity;
    for (int64_t i = begin; i < begin + p_.selected.counts[r]; ++i) {
      const int32_t place = PlaceOf(p_.selected.units[i]);
      if (kept_.Has(place)) {
        p_.resident[begin + p_.resident_counts[r]++] = place;
      } else {
        p_.arriving[begin + p_.arriving_counts[r]++] = place;
      }
    }
    return p_.selected.counts[r];
  }

  const UpdateResidencyParams& p_;
  const ResidencyTable& t_;
  const int64_t first_, count_, slot_;
  const int32_t last_;
  PlaceSet kept_;       // places that were kept before anything was given
  PlaceSet given_;      // places that this call has given
  const int64_t list_;  // the row's list in the journal
};

// Undoes the row whose list is `list`.
void TakeBackRow(const TakeBackResidencyParams& p, int64_t slot, int64_t list) {
  const ResidencyTable& t = p.residency;
  const ResidencyJournal& journal = p.journal;
  const int64_t begin = list * journal.capacity, end = begin + journal.counts[list];
  p.move_counts[list] = journal.counts[list];
  // A unit that loses its place was not there before the row, and so is none that gets one back.
  for (int64_t at = begin; at < end; ++at) {
    const int32_t place = journal.places[at], unit = journal.units[at];
    int32_t* row = TableRow(t.places, slot, place);
    const bool changed = row[0] != unit, moves = changed && unit >= 0;
    if (changed && row[0] >= 0) *TableRow(t.place_of, slot, row[0]) = -1;
    row[0] = unit;
    row[1] = journal.stamps[at];
    if (moves) *TableRow(t.place_of, slot, unit) = place;
    journal.units[at] = moves ? static_cast<int32_t>(EntryIndex(p.home, slot, unit)) : -1;
    journal.places[at] = moves ? static_cast<int32_t>(EntryIndex(p.pool, slot, place)) : -1;
  }
}

}  // namespace

void UpdateResidency(const UpdateResidencyParams& p, Worker worker) {
  if (p.residency.count > kMaxPlaces) KernelCheckFailed("update_residency: up to 2^20 places");
  const Range mine = Share(p.rows, worker);
  for (int64_t first = 0, count = 1; first < p.rows; first += count) {
    const int32_t slot = p.slots[first];
    for (count = 1; slot >= 0 && first + count < p.rows && p.slots[first + count] == slot;) ++count;
    if (count > kMaxQueryPositions && !p.in_turn)
      KernelCheckFailed("update_residency: too many rows of one sequence");
    // The worker that has a sequence's first row has the sequence.
    if (first < mine.begin || first >= mine.end) continue;
    for (int64_t r = first; r < first + count; ++r) {
      p.resident_counts[r] = p.arriving_counts[r] = p.move_counts[r] = 0;
    }
    if (slot < 0) continue;
    const int64_t together = p.in_turn ? 1 : count;
    for (int64_t r = first; r < first + count; r += together) SequenceUpdate(p, r, together).Run();
  }
}

void TakeBackResidency(const TakeBackResidencyParams& p, Worker worker) {
  const Range mine = Share(p.slots, worker);
  for (int64_t slot = mine.begin; slot < mine.end; ++slot) {
    const int64_t lists = slot * p.journal.rows;
    for (int64_t i = 0; i < p.journal.rows; ++i) p.move_counts[lists + i] = 0;
    for (int64_t undone = 0; undone < p.rows[slot]; ++undone) {
      TakeBackRow(p, slot, lists + (p.last[slot] - undone) % p.journal.rows);
    }
  }
}

}  // namespace sluice::kernels::cpu
