// SegmentLists and DivideLists.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/reference/reference.h"
#include "kernels/reference/unit_tables.h"
#include "kernels/scalar.h"

namespace sluice::kernels::reference {
namespace {

// Returns the units that hold the tokens [begin, end).
std::vector<int32_t> UnitsOf(int32_t begin, int32_t end, int32_t unit_tokens) {
  std::vector<int32_t> units;
  for (int32_t token = begin; token < end; ++token) {
    const int32_t unit = token / unit_tokens;
    if (units.empty() || units.back() != unit) units.push_back(unit);
  }
  return units;
}

}  // namespace

void SegmentLists(const SegmentListsParams& p, Worker worker) {
  const ResidencyTable& t = p.residency;
  const Range mine = Share(int64_t{p.rows} * p.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t r = list / p.kv_heads, head = list % p.kv_heads, slot = p.slots[r];
    PutList(p.sink, list, {});
    PutList(p.local, list, {});
    if (slot < 0) continue;
    const int32_t newest = p.positions[r] / p.unit_tokens;
    const FluxionSegments segments = SegmentsOf(p.positions[r]);
    const std::vector<int32_t> sink = UnitsOf(0, segments.sink, p.unit_tokens);
    const std::vector<int32_t> local = UnitsOf(segments.local, segments.end, p.unit_tokens);
    for (size_t i = 0; i < sink.size(); ++i) {
      const bool in_ring = newest - sink[i] < t.ring;
      const int32_t place = PlaceOf(t, slot, head, newest, sink[i]);
      if (place < 0) KernelCheckFailed("segment lists: a unit of the sink has no place");
      if (!in_ring) TableRow(t.places, slot, place, head)[1] = p.positions[r];
      p.sink_places[list * p.sink.capacity + static_cast<int64_t>(i)] = place;
    }
    for (size_t i = 0; i < local.size(); ++i) {
      p.local_places[list * p.local.capacity + static_cast<int64_t>(i)] = local[i] % t.ring;
    }
    PutList(p.sink, list, sink);
    PutList(p.local, list, local);
  }
}

void DivideLists(const DivideListsParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    int64_t units = 0, read = 0;
    for (int64_t list = r * p.kv_heads; list < (r + 1) * p.kv_heads; ++list) {
      const int32_t* from = p.from.units + list * p.from.capacity;
      const int32_t count = p.slots[r] < 0 ? 0 : p.from.counts[list];
      float share = p.share;
      if (p.shares != nullptr && p.slots[r] >= 0) {
        share = p.shares[int64_t{p.slots[r]} * p.kv_heads + list - r * p.kv_heads];
      }
      const double wanted = std::ceil(double{static_cast<float>(count) * share});
      const int32_t cut = std::min(count, static_cast<int32_t>(wanted));
      PutList(p.first, list, {from, from + cut});
      PutList(p.rest, list, {from + cut, from + count});
      units += count;
      read += cut;
    }
    if (p.slots[r] < 0 || p.counters == nullptr) continue;
    p.counters[p.slots[r]].missing += units * p.unit_tokens;
    p.counters[p.slots[r]].read += read * p.unit_tokens;
  }
}

}  // namespace sluice::kernels::reference
