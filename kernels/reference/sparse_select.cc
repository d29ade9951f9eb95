#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "kernels/reference/element.h"
#include "kernels/reference/reference.h"
#include "kernels/reference/unit_tables.h"

namespace sluice::kernels::reference {
namespace {

std::vector<int32_t> ListOf(const UnitLists& lists, int64_t list) {
  const int32_t* units = lists.units + list * lists.capacity;
  return std::vector<int32_t>(units, units + lists.counts[list]);
}

// Gives `unit` the place of the table that is to be given next, stamps it with `position` and
// returns it; -1: none is to be given.
int32_t GivePlace(const ResidencyTable& t, int64_t slot, int64_t head, int32_t position,
                  int32_t unit, bool only_free = false) {
  constexpr int64_t kFree = std::numeric_limits<int64_t>::min();
  std::pair<int64_t, int32_t> best = {std::numeric_limits<int64_t>::max(), -1};
  for (int32_t place = t.ring; place < t.count; ++place) {
    const int32_t* row = TableRow(t.places, slot, place, head);
    if (row[0] == kNoPlace || (row[0] >= 0 && (only_free || row[1] == position))) continue;
    best = std::min(best, {row[0] < 0 ? kFree : row[1], place});
  }
  if (best.second < 0) return -1;
  int32_t* row = TableRow(t.places, slot, best.second, head);
  if (row[0] >= 0) *TableRow(t.place_of, slot, row[0], head) = -1;
  row[0] = unit;
  row[1] = position;
  *TableRow(t.place_of, slot, unit, head) = best.second;
  return best.second;
}

// Returns the index of a block, or of a token's K row, among the pieces of that size in `cache`;
// `at` is the unit or place. See RecallParams.
int32_t PieceIndex(const PagedCache& c, int64_t slot, int64_t head, int64_t at, int64_t tokens) {
  const bool token = tokens == 1;
  const int64_t block = token ? at / c.block_tokens : at;
  const int64_t piece = HeadBlock(c, slot, block, head);
  if (!token) return static_cast<int32_t>(piece);
  return static_cast<int32_t>(piece * 2 * c.block_tokens + at % c.block_tokens);
}

// The selection of a list (TopKParams), and its runners-up.
struct Selection {
  std::set<int32_t> chosen, runners_up;
};

Selection Select(const TopKParams& p, int64_t list) {
  const int64_t r = list / p.kv_heads;
  Selection result;
  if (!IsWanted(p, list, r)) return result;
  const int32_t units = p.positions[r] / p.unit_tokens + 1;
  std::vector<std::pair<float, int32_t>> others;  // {-score, unit}
  float largest = kNegativeInfinity;
  for (int32_t u = 0; u < units; ++u) {
    const float given = p.scores[list * p.score_stride + u];
    const float score = std::isnan(given) ? kNegativeInfinity : given;
    largest = std::max(largest, score);
    if (u < p.first_units || u >= units - p.last_units) {
      result.chosen.insert(u);
    } else {
      others.emplace_back(-score, u);
    }
  }
  std::sort(others.begin(), others.end());
  const float least = std::isinf(p.margin) ? kNegativeInfinity : largest - p.margin;
  for (const auto& [minus, unit] : others) {
    if (-minus < least) continue;
    if (std::ssize(result.chosen) < KOfRow(p, units)) {
      result.chosen.insert(unit);
    } else if (std::ssize(result.runners_up) < p.runners_up.capacity) {
      result.runners_up.insert(unit);
    }
  }
  return result;
}

// Gives each of `missing`, tokens in ascending order, a place as Bring does, and lists the moves of
// the list. Returns how many were given one.
int32_t GivePlaces(const BringParams& p, int64_t list, const std::vector<int32_t>& missing) {
  const ResidencyTable& t = p.residency;
  const int64_t r = list / p.select.kv_heads, head = list % p.select.kv_heads;
  const int64_t slot = p.select.slots[r];
  const int32_t position = p.select.positions[r];
  constexpr int64_t kFree = std::numeric_limits<int64_t>::min();
  std::vector<std::pair<int64_t, int32_t>> offered;  // {stamp, place}
  for (int32_t place = t.ring; place < t.count; ++place) {
    const int32_t* row = TableRow(t.places, slot, place, head);
    if (row[0] == kNoPlace || (row[0] >= 0 && row[1] == position)) continue;
    offered.emplace_back(row[0] < 0 ? kFree : row[1], place);
  }
  std::sort(offered.begin(), offered.end());
  std::vector<int32_t> given;
  for (size_t i = 0; i < std::min(offered.size(), missing.size()); ++i) {
    given.push_back(offered[i].second);
  }
  std::sort(given.begin(), given.end());
  for (size_t i = 0; i < given.size(); ++i) {
    int32_t* row = TableRow(t.places, slot, given[i], head);
    if (row[0] >= 0) *TableRow(t.place_of, slot, row[0], head) = -1;
    row[0] = missing[i];
    row[1] = position;
    *TableRow(t.place_of, slot, missing[i], head) = given[i];
    const int64_t move = list * p.move_capacity + static_cast<int64_t>(i);
    p.source_units[move] = PieceIndex(p.home, slot, head, missing[i], 1);
    p.target_units[move] = PieceIndex(p.cache, slot, head, given[i], 1);
  }
  return static_cast<int32_t>(given.size());
}

// Takes all places behind the ring back from their units.
void ForgetPlaces(const ResidencyTable& t, int64_t slot, int64_t head) {
  for (int32_t place = t.ring; place < t.count; ++place) {
    int32_t& unit = *TableRow(t.places, slot, place, head);
    if (unit < 0) continue;
    *TableRow(t.place_of, slot, unit, head) = -1;
    unit = -1;
  }
}

}  // namespace

void TopK(const TopKParams& p, Worker worker) {
  const Range mine = Share(int64_t{p.rows} * p.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const Selection selection = Select(p, list);
    PutList(p.selected, list, {selection.chosen.begin(), selection.chosen.end()});
    if (p.runners_up.units == nullptr) continue;
    PutList(p.runners_up, list, {selection.runners_up.begin(), selection.runners_up.end()});
  }
}

void Bring(const BringParams& p, Worker worker) {
  const ResidencyTable& t = p.residency;
  const Range mine = Share(p.select.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    const int64_t slot = p.select.slots[r];
    const int32_t position = p.select.positions[r];
    for (int64_t head = 0; head < p.select.kv_heads; ++head) {
      const int64_t list = r * p.select.kv_heads + head;
      if (p.move_counts != nullptr) p.move_counts[list] = 0;
      if (p.listed != nullptr && p.listed[list] == 0) continue;
      const bool persistent = IsPersistent(t, head), whole = p.whole && !persistent;
      const std::set<int32_t> selected = Select(p.select, list).chosen;
      std::vector<int32_t> missing;
      if (p.forget && !persistent && IsWanted(p.select, list, r)) ForgetPlaces(t, slot, head);
      for (int32_t unit : selected) {
        const int32_t place = PlaceOf(t, slot, head, position, unit);
        if (place < 0) {
          missing.push_back(unit);
        } else if (position - unit >= t.ring && !persistent) {
          TableRow(t.places, slot, place, head)[1] = position;
        }
      }
      std::vector<std::pair<int32_t, int32_t>> attended;  // {place, unit}
      if (slot >= 0) {
        SparseCounters& counters = p.counters[slot];
        const int32_t moves = missing.empty() ? 0 : GivePlaces(p, list, missing);
        if (moves > 0) p.move_counts[list] = moves;
        (persistent ? counters.held : counters.selected) += std::ssize(selected);
        counters.missing += std::ssize(missing);
        counters.recalled += moves;
        for (int32_t unit = 0; unit <= position; ++unit) {
          const int32_t place = PlaceOf(t, slot, head, position, unit);
          if (place >= 0 && (whole || selected.contains(unit))) attended.emplace_back(place, unit);
        }
      }
      if (whole && p.by_place) std::sort(attended.begin(), attended.end());
      std::vector<int32_t> units;
      for (const auto& [place, unit] : attended) {
        p.places[list * p.resident.capacity + std::ssize(units)] = place;
        units.push_back(unit);
      }
      PutList(p.resident, list, units);
    }
    if (slot < 0) continue;
    p.counters[slot].steps += 1;
    p.counters[slot].recalls += 1;
  }
}

void Split(const SplitParams& p, Worker worker) {
  const ResidencyTable& t = p.residency;
  const Range mine = Share(int64_t{p.rows} * p.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t r = list / p.kv_heads, head = list % p.kv_heads, slot = p.slots[r];
    std::vector<int32_t> resident, missing;
    if (slot >= 0) {
      const int32_t newest = p.positions[r] / p.unit_tokens;
      for (int32_t unit : ListOf(p.selected, list)) {
        const int32_t place = PlaceOf(t, slot, head, newest, unit);
        if (place < 0) {
          missing.push_back(unit);
          continue;
        }
        if (newest - unit >= t.ring) TableRow(t.places, slot, place, head)[1] = p.positions[r];
        if (!p.whole) resident.push_back(unit);
      }
      for (int32_t unit = 0; p.whole && unit <= newest; ++unit) {
        if (PlaceOf(t, slot, head, newest, unit) >= 0) resident.push_back(unit);
      }
      if (std::ssize(resident) > p.resident.capacity) KernelCheckFailed("split: no room");
      for (size_t i = 0; i < resident.size(); ++i) {
        p.places[list * p.resident.capacity + static_cast<int64_t>(i)] =
            PlaceOf(t, slot, head, newest, resident[i]);
      }
    }
    PutList(p.resident, list, resident);
    PutList(p.missing, list, missing);
  }
}

void RecallDue(const RecallDueParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    p.due[r] = 0;
    if (p.slots[r] < 0) continue;
    int64_t selected = 0, missing = 0;
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      selected += p.selected.counts[r * p.kv_heads + h];
      missing += p.missing.counts[r * p.kv_heads + h];
    }
    SparseCounters& counters = p.counters[p.slots[r]];
    counters.steps += 1;
    counters.selected += selected * p.unit_tokens;
    counters.missing += missing * p.unit_tokens;
    int32_t& since = p.since[p.slots[r]];
    if (p.interval > 0) {
      p.due[r] = since + 1 >= p.interval ? 1 : 0;
    } else {
      const double share =
          static_cast<double>(missing) / (static_cast<double>(p.kv_heads) * p.budget_units);
      const double steps = double{1} + since;
      p.due[r] = share * (steps + 1) / steps > double{p.share_limit} ? 1 : 0;
    }
    since = p.due[r] != 0 ? 0 : since + 1;
  }
}

void Recall(const RecallParams& p, Worker worker) {
  const ResidencyTable& t = p.residency;
  if (p.unit_tokens != 1 && p.unit_tokens != p.home.block_tokens) {
    KernelCheckFailed("recall: a unit is a block or a token");
  }
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    const int64_t slot = p.slots[r];
    const bool due = slot >= 0 && (p.due == nullptr || p.due[r] != 0);
    int64_t moved = 0;
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      const int64_t list = r * p.kv_heads + h;
      p.move_counts[list] = 0;
      if (!due) continue;
      for (int32_t unit : ListOf(p.missing, list)) {
        const int32_t place = GivePlace(t, slot, h, p.positions[r], unit);
        if (place < 0) break;
        const int64_t move = list * p.missing.capacity + p.move_counts[list]++;
        p.source_units[move] = PieceIndex(p.home, slot, h, unit, p.unit_tokens);
        p.target_units[move] = PieceIndex(p.resident, slot, h, place, p.unit_tokens);
      }
      moved += p.move_counts[list];
    }
    if (!due || p.counters == nullptr) continue;
    p.counters[slot].recalled += moved * p.unit_tokens;
    p.counters[slot].recalls += 1;
  }
}

void Retain(const RetainParams& p, Worker worker) {
  const ResidencyTable& t = p.residency;
  const PagedCache& c = p.resident;
  if (p.unit_tokens != 1 && p.unit_tokens != c.block_tokens) {
    KernelCheckFailed("retain: a unit is a block or a token");
  }
  const int64_t values = int64_t{c.block_tokens} * c.head_dim;  // from K to V
  const Range mine = Share(int64_t{p.rows} * c.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t r = list / c.kv_heads, head = list % c.kv_heads, slot = p.slots[r];
    const int32_t next = p.positions[r] + 1, unit = next / p.unit_tokens - t.ring;
    if (slot < 0 || next % p.unit_tokens != 0 || unit < 0) continue;
    const bool persistent = IsPersistent(t, head);
    if (!persistent && *TableRow(t.place_of, slot, unit, head) >= 0) continue;
    const int32_t place =
        persistent ? t.ring + unit : GivePlace(t, slot, head, p.positions[r], unit, p.only_free);
    if (place < 0) continue;
    for (int64_t i = 0; i < p.unit_tokens; ++i) {
      const int64_t from = KeyIndex(c, slot, unit % t.ring * p.unit_tokens + i, head);
      const int64_t to = KeyIndex(c, slot, int64_t{place} * p.unit_tokens + i, head);
      for (int64_t d = 0; d < c.head_dim; ++d) {
        Put(c.base, c.type, to + d, Get(c.base, c.type, from + d));
        Put(c.base, c.type, to + values + d, Get(c.base, c.type, from + values + d));
      }
    }
  }
}

void WriteThrough(const WriteThroughParams& p, Worker worker) {
  const PagedCache& c = p.home;
  const int64_t dim = c.head_dim;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] < 0) continue;
    for (int64_t h = 0; h < c.kv_heads; ++h) {
      const int64_t key = KeyIndex(c, p.slots[r], p.positions[r], h);
      const int64_t from = (r * c.kv_heads + h) * 2 * dim;
      for (int64_t d = 0; d < dim; ++d) {
        Put(c.base, c.type, key + d, Get(p.written, c.type, from + d));
        Put(c.base, c.type, key + c.block_tokens * dim + d, Get(p.written, c.type, from + dim + d));
      }
    }
  }
}

}  // namespace sluice::kernels::reference
