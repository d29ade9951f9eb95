#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "kernels/latent_layout.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {
namespace {

// Updates rows [first, first + count), which are of one slot.
void UpdateSequence(const UpdateResidencyParams& p, int64_t first, int64_t count) {
  const ResidencyTable& t = p.residency;
  const int64_t slot = p.slots[first];
  const int32_t last = p.positions[first + count - 1];
  const auto place_of = [&](int32_t unit) -> int32_t& { return *TableRow(t.place_of, slot, unit); };
  const ResidencyJournal& journal = p.journal;
  const bool notes = p.in_turn && journal.rows > 0;
  const int64_t noted = notes ? slot * journal.rows + last % journal.rows : 0;
  if (notes) journal.counts[noted] = 0;
  // Notes what a place holds before it changes.
  const auto note = [&](int32_t place) {
    if (!notes) return;
    const int32_t* row = TableRow(t.places, slot, place);
    if (journal.counts[noted] >= journal.capacity)
      KernelCheckFailed("update_residency: no room in the journal");
    const int64_t at = noted * journal.capacity + journal.counts[noted]++;
    journal.places[at] = place;
    journal.units[at] = row[0];
    journal.stamps[at] = row[1];
  };
  for (int32_t place = 0; p.forget && place < t.count; ++place) {
    int32_t& unit = *TableRow(t.places, slot, place);
    if (unit < 0) continue;
    place_of(unit) = -1;
    unit = -1;
  }
  std::set<int32_t> selected, kept, missing, ahead;
  int64_t units = 0;
  for (int64_t r = first; r < first + count; ++r) {
    const int32_t* list = p.selected.units + r * p.selected.capacity;
    selected.insert(list, list + p.selected.counts[r]);
    units += p.selected.counts[r];
  }
  kept = selected;
  for (int32_t unit : selected) {
    if (place_of(unit) < 0) missing.insert(unit);
  }
  for (int32_t unit = last + 1; unit <= last + p.ahead; ++unit) {
    kept.insert(unit);
    if (place_of(unit) < 0) ahead.insert(unit);
  }
  for (int32_t unit : selected) {
    if (place_of(unit) < 0) continue;
    note(place_of(unit));
    TableRow(t.places, slot, place_of(unit))[1] = last;
  }
  // The places that may be given, in the order of giving: {whether taken, stamp, place}.
  std::vector<std::pair<std::pair<bool, int32_t>, int32_t>> order;
  for (int32_t place = 0; place < t.count; ++place) {
    const int32_t* row = TableRow(t.places, slot, place);
    if (row[0] == kNoPlace || (row[0] >= 0 && kept.contains(row[0]))) continue;
    order.push_back({{row[0] >= 0, row[0] >= 0 ? row[1] : 0}, place});
  }
  std::sort(order.begin(), order.end());
  if (order.size() < missing.size() + ahead.size()) {
    KernelCheckFailed("update_residency: fewer places than selected units");
  }
  auto next = order.begin();
  const auto give = [&](int32_t unit, int32_t stamp) {
    const int32_t place = (next++)->second;
    int32_t* row = TableRow(t.places, slot, place);
    note(place);
    if (row[0] >= 0) place_of(row[0]) = -1;
    row[0] = unit;
    row[1] = stamp;
    place_of(unit) = place;
    return place;
  };
  if (std::ssize(missing) > p.move_capacity)
    KernelCheckFailed("update_residency: no room for the moves");
  for (int32_t unit : missing) {
    const int32_t place = give(unit, last);
    const int64_t move = first * p.move_capacity + p.move_counts[first]++;
    p.source_units[move] = static_cast<int32_t>(EntryIndex(p.home, slot, unit));
    p.target_units[move] = static_cast<int32_t>(EntryIndex(p.pool, slot, place));
  }
  for (int32_t unit : ahead) give(unit, unit);
  for (int64_t r = first; r < first + count; ++r) {
    for (int64_t i = 0; i < p.selected.counts[r]; ++i) {
      const int64_t begin = r * p.selected.capacity;
      const int32_t unit = p.selected.units[begin + i];
      if (missing.contains(unit)) {
        p.arriving[begin + p.arriving_counts[r]++] = place_of(unit);
      } else {
        p.resident[begin + p.resident_counts[r]++] = place_of(unit);
      }
    }
  }
  if (p.counters == nullptr) return;
  p.counters[slot].recalled += std::ssize(missing);
  if (p.speculative) return;
  p.counters[slot].steps += 1;
  p.counters[slot].selected += units;
  p.counters[slot].missing += std::ssize(missing);
}

}  // namespace

void UpdateResidency(const UpdateResidencyParams& p, Worker worker) {
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
    for (int64_t r = first; r < first + count; r += together) UpdateSequence(p, r, together);
  }
}

void TakeBackResidency(const TakeBackResidencyParams& p, Worker worker) {
  const ResidencyTable& t = p.residency;
  const ResidencyJournal& journal = p.journal;
  const Range mine = Share(p.slots, worker);
  for (int64_t slot = mine.begin; slot < mine.end; ++slot) {
    for (int64_t i = 0; i < journal.rows; ++i) p.move_counts[slot * journal.rows + i] = 0;
    for (int64_t undone = 0; undone < p.rows[slot]; ++undone) {
      const int64_t list = slot * journal.rows + (p.last[slot] - undone) % journal.rows;
      const int64_t begin = list * journal.capacity, end = begin + journal.counts[list];
      p.move_counts[list] = journal.counts[list];
      for (int64_t at = begin; at < end; ++at) {
        const int32_t now = *TableRow(t.places, slot, journal.places[at]);
        if (now >= 0 && now != journal.units[at]) *TableRow(t.place_of, slot, now) = -1;
      }
      for (int64_t at = begin; at < end; ++at) {
        const int32_t place = journal.places[at], unit = journal.units[at];
        int32_t* row = TableRow(t.places, slot, place);
        const bool moves = unit >= 0 && row[0] != unit;
        row[0] = unit;
        row[1] = journal.stamps[at];
        if (moves) *TableRow(t.place_of, slot, unit) = place;
        journal.units[at] = moves ? static_cast<int32_t>(EntryIndex(p.home, slot, unit)) : -1;
        journal.places[at] = moves ? static_cast<int32_t>(EntryIndex(p.pool, slot, place)) : -1;
      }
    }
  }
}

}  // namespace sluice::kernels::reference
