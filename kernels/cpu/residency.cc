// The operators on residency: Split, RecallDue, Recall, Retain, WriteThrough. They work on integers
// and copies, for every path.
#include <cstring>

#include "kernels/cpu/residency_tables.h"

namespace sluice::kernels::cpu {
namespace {

void SplitList(const SplitParams& p, int64_t list) {
  const ResidencyTable& t = p.residency;
  const int64_t r = list / p.kv_heads, head = list % p.kv_heads, slot = p.slots[r];
  ListWriter missing(p.missing, list), resident(p.resident, list);
  if (slot < 0) return;
  const int32_t newest = p.positions[r] / p.unit_tokens;
  int32_t* places = p.places + list * p.resident.capacity;
  const int32_t* selected = p.selected.units + list * p.selected.capacity;
  for (int32_t i = 0; i < p.selected.counts[list]; ++i) {
    const int32_t unit = selected[i], place = PlaceOf(t, slot, head, newest, unit);
    if (place < 0) {
      missing.Add(unit);
      continue;
    }
    if (newest - unit >= t.ring) TableRow(t.places, slot, place, head)[1] = p.positions[r];
    if (!p.whole) places[resident.Add(unit)] = place;
  }
  for (int32_t unit = 0; p.whole && unit <= newest; ++unit) {
    const int32_t place = PlaceOf(t, slot, head, newest, unit);
    if (place >= 0) places[resident.Add(unit)] = place;
  }
}

// Returns how many units of the list were given a place.
int32_t RecallList(const RecallParams& p, int64_t list) {
  const ResidencyTable& t = p.residency;
  const int64_t r = list / p.kv_heads, head = list % p.kv_heads, slot = p.slots[r];
  const int64_t moves = list * p.missing.capacity;
  const int32_t* units = p.missing.units + moves;
  PlaceHeap heap(p.source_units + moves, p.target_units + moves, p.missing.counts[list]);
  if (p.missing.counts[list] == 0) return 0;
  OfferPlaces(t, slot, head, p.positions[r], &heap);
  heap.Sort();
  for (int32_t i = 0; i < heap.count(); ++i) {
    const int32_t place = p.target_units[moves + i];
    Assign(t, slot, head, place, units[i], p.positions[r]);
    p.source_units[moves + i] = PieceIndex(p.home, slot, head, units[i], p.unit_tokens);
    p.target_units[moves + i] = PieceIndex(p.resident, slot, head, place, p.unit_tokens);
  }
  return heap.count();
}

// Gives a unit that has no place the one that is to be given next, and returns it; -1: the unit has
// a place, or none is to be given.
int32_t TakePlace(const ResidencyTable& t, int64_t slot, int64_t head, int32_t unit,
                  int32_t position, bool only_free) {
  if (*TableRow(t.place_of, slot, unit, head) >= 0) return -1;
  int32_t best = -1, of_best = 0;  // the place, and its stamp
  for (int32_t place = t.ring; place < t.count; ++place) {
    if (!MayBeGiven(t, slot, head, place, position)) continue;
    const int32_t stamp = StampOf(t, slot, head, place);
    if (only_free && stamp != PlaceHeap::kFree) continue;
    if (best >= 0 && stamp >= of_best) continue;
    best = place;
    of_best = stamp;
  }
  if (best < 0) return -1;
  Assign(t, slot, head, best, unit, position);
  return best;
}

}  // namespace

void Split(const SplitParams& p, Worker worker) {
  const Range mine = Share(int64_t{p.rows} * p.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) SplitList(p, list);
}

void RecallDue(const RecallDueParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    p.due[r] = 0;
    if (p.slots[r] < 0) continue;
    int64_t selected = 0, missing = 0;
    for (int64_t list = r * p.kv_heads; list < (r + 1) * p.kv_heads; ++list) {
      selected += p.selected.counts[list];
      missing += p.missing.counts[list];
    }
    SparseCounters& counters = p.counters[p.slots[r]];
    counters.steps += 1;
    counters.selected += selected * p.unit_tokens;
    counters.missing += missing * p.unit_tokens;
    int32_t& since = p.since[p.slots[r]];
    bool due = p.interval > 0 && since + 1 >= p.interval;
    if (p.interval <= 0) {
      const double share =
          static_cast<double>(missing) / (static_cast<double>(p.kv_heads) * p.budget_units);
      const double steps = double{1} + since;
      due = share * (steps + 1) / steps > double{p.share_limit};
    }
    p.due[r] = due ? 1 : 0;
    since = due ? 0 : since + 1;
  }
}

// A worker takes whole lists. The counters of a slot are sums over its lists, in any order of
// workers.
void Recall(const RecallParams& p, Worker worker) {
  if (p.unit_tokens != 1 && p.unit_tokens != p.home.block_tokens) {
    KernelCheckFailed("recall: a unit is a block or a token");
  }
  const Range mine = Share(int64_t{p.rows} * p.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t r = list / p.kv_heads, slot = p.slots[r];
    p.move_counts[list] = 0;
    if (slot < 0 || (p.due != nullptr && p.due[r] == 0)) continue;
    p.move_counts[list] = RecallList(p, list);
    if (p.counters == nullptr) continue;
    __atomic_fetch_add(&p.counters[slot].recalled, int64_t{p.move_counts[list]} * p.unit_tokens,
                       __ATOMIC_RELAXED);
    if (list % p.kv_heads == 0) p.counters[slot].recalls += 1;
  }
}

void Retain(const RetainParams& p, Worker worker) {
  const ResidencyTable& t = p.residency;
  const PagedCache& c = p.resident;
  if (p.unit_tokens != 1 && p.unit_tokens != c.block_tokens) {
    KernelCheckFailed("retain: a unit is a block or a token");
  }
  const int64_t row_bytes = int64_t{c.head_dim} * SizeOf(c.type);
  const int64_t values = c.block_tokens * row_bytes;  // from K to V
  const auto bytes = static_cast<size_t>(p.unit_tokens * row_bytes);
  const Range mine = Share(int64_t{p.rows} * c.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t r = list / c.kv_heads, head = list % c.kv_heads, slot = p.slots[r];
    const int32_t next = p.positions[r] + 1, unit = next / p.unit_tokens - t.ring;
    if (slot < 0 || next % p.unit_tokens != 0 || unit < 0) continue;
    const int32_t place = IsPersistent(t, head)
                              ? t.ring + unit
                              : TakePlace(t, slot, head, unit, p.positions[r], p.only_free);
    if (place < 0) continue;
    const auto key = [&](int64_t at) {
      return static_cast<char*>(c.base) +
             KeyIndex(c, slot, at * p.unit_tokens, head) * SizeOf(c.type);
    };
    const char* from = key(unit % t.ring);
    char* to = key(place);
    std::memcpy(to, from, bytes);
    std::memcpy(to + values, from + values, bytes);
  }
}

void WriteThrough(const WriteThroughParams& p, Worker worker) {
  const PagedCache& c = p.home;
  const int64_t bytes = int64_t{c.head_dim} * SizeOf(c.type);
  const Range mine = Share(int64_t{p.rows} * c.kv_heads, worker);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t r = item / c.kv_heads, head = item % c.kv_heads;
    if (p.slots[r] < 0) continue;
    const char* from = static_cast<const char*>(p.written) + item * 2 * bytes;
    char* key =
        static_cast<char*>(c.base) + KeyIndex(c, p.slots[r], p.positions[r], head) * SizeOf(c.type);
    std::memcpy(key, from, static_cast<size_t>(bytes));
    std::memcpy(key + c.block_tokens * bytes, from + bytes, static_cast<size_t>(bytes));
  }
}

}  // namespace sluice::kernels::cpu
