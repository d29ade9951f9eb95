// Bring, for every path. A worker takes whole lists.
#include <algorithm>

#include "kernels/cpu/residency_tables.h"

namespace sluice::kernels::cpu {
namespace {

struct List {
  const BringParams& p;
  int64_t list, slot, head;
  int32_t position;
  bool persistent;

  int32_t* moves_of(int32_t* units) const { return units + list * p.move_capacity; }

  // Selects to the list of residents.
  void Select() const {
    TopKParams select = p.select;
    select.selected = p.resident;
    select.runners_up = {};
    TopKList(select, list);
  }

  // Stamps the places of selected tokens, and puts those that have none into source_units. Returns
  // how many.
  int32_t FindMissing() const {
    const ResidencyTable& t = p.residency;
    const int32_t* selected = p.resident.units + list * p.resident.capacity;
    int32_t* missing = moves_of(p.source_units);
    int32_t count = 0;
    for (int32_t i = 0; i < p.resident.counts[list]; ++i) {
      const int32_t place = PlaceOf(t, slot, head, position, selected[i]);
      if (place < 0) {
        missing[count++] = selected[i];
      } else if (position - selected[i] >= t.ring) {
        TableRow(t.places, slot, place, head)[1] = position;
      }
    }
    return count;
  }

  // Gives places to the first of `missing` tokens in source_units, and lists the moves. Returns how
  // many have one. The heap's stamps lie where the list's places will be.
  int32_t GivePlaces(int32_t missing) const {
    const ResidencyTable& t = p.residency;
    int32_t *sources = moves_of(p.source_units), *targets = moves_of(p.target_units);
    PlaceHeap heap(p.places + list * p.resident.capacity, targets, missing);
    OfferPlaces(t, slot, head, position, &heap);
    std::sort(targets, targets + heap.count());
    for (int32_t i = 0; i < heap.count(); ++i) {
      Assign(t, slot, head, targets[i], sources[i], position);
      sources[i] = PieceIndex(p.home, slot, head, sources[i], 1);
      targets[i] = PieceIndex(p.cache, slot, head, targets[i], 1);
    }
    return heap.count();
  }

  // Lists every token that has a place.
  void ListAll() const {
    const ResidencyTable& t = p.residency;
    int32_t* places = p.places + list * p.resident.capacity;
    ListWriter resident(p.resident, list);
    for (int32_t unit = 0; !p.by_place && unit <= position; ++unit) {
      const int32_t place = PlaceOf(t, slot, head, position, unit);
      if (place >= 0) places[resident.Add(unit)] = place;
    }
    for (int32_t place = 0; p.by_place && place < t.count; ++place) {
      const bool in_ring = place < t.ring;
      const int32_t unit = in_ring ? position - (position - place + t.ring) % t.ring
                                   : TableRow(t.places, slot, place, head)[0];
      // A row that is computed again finds what leaves the ring behind it already.
      if (unit < 0 || (!in_ring && position - unit < t.ring)) continue;
      places[resident.Add(unit)] = place;
    }
  }

  // Leaves of the selected tokens those that have a place.
  void ListSelected() const {
    int32_t* units = p.resident.units + list * p.resident.capacity;
    int32_t* places = p.places + list * p.resident.capacity;
    int32_t& count = p.resident.counts[list];
    int32_t kept = 0;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t place = PlaceOf(p.residency, slot, head, position, units[i]);
      if (place < 0) continue;
      units[kept] = units[i];
      places[kept++] = place;
    }
    count = kept;
  }

  void Run() const {
    if (p.move_counts != nullptr) p.move_counts[list] = 0;
    const bool whole = p.whole && !persistent;
    if (IsWanted(p.select, list, list / p.select.kv_heads)) {
      Select();
      const int32_t selected = p.resident.counts[list];
      if (p.forget && !persistent) ForgetPlaces(p.residency, slot, head);
      const int32_t missing = persistent ? 0 : FindMissing();
      const int32_t moves = missing == 0 ? 0 : GivePlaces(missing);
      if (moves > 0) p.move_counts[list] = moves;
      SparseCounters& counters = p.counters[slot];
      __atomic_fetch_add(persistent ? &counters.held : &counters.selected, selected,
                         __ATOMIC_RELAXED);
      __atomic_fetch_add(&counters.missing, missing, __ATOMIC_RELAXED);
      __atomic_fetch_add(&counters.recalled, moves, __ATOMIC_RELAXED);
      if (!whole) ListSelected();
    } else if (!whole || slot < 0) {
      p.resident.counts[list] = 0;
    }
    if (whole && slot >= 0) ListAll();
  }
};

}  // namespace

void Bring(const BringParams& p, Worker worker) {
  if (p.select.unit_tokens != 1 || p.select.k < 1 ||
      p.select.k < p.select.first_units + p.select.last_units) {
    KernelCheckFailed("bring: a unit is a token, and first_units + last_units <= k, 1 <= k");
  }
  const Range mine = Share(int64_t{p.select.rows} * p.select.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t r = list / p.select.kv_heads, head = list % p.select.kv_heads;
    const int64_t slot = p.select.slots[r];
    if (slot >= 0 && head == 0) {
      p.counters[slot].steps += 1;
      p.counters[slot].recalls += 1;
    }
    if (p.listed != nullptr && p.listed[list] == 0) {
      if (p.move_counts != nullptr) p.move_counts[list] = 0;
      continue;
    }
    const bool persistent = slot >= 0 && IsPersistent(p.residency, head);
    List{p, list, slot, head, p.select.positions[r], persistent}.Run();
  }
}

}  // namespace sluice::kernels::cpu
