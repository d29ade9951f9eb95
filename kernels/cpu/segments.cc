// SegmentLists and DivideLists, for every path.
#include <cstring>

#include "kernels/cpu/residency_tables.h"

namespace sluice::kernels::cpu {
namespace {

void ListSegments(const SegmentListsParams& p, int64_t list) {
  const ResidencyTable& t = p.residency;
  const int64_t r = list / p.kv_heads, head = list % p.kv_heads, slot = p.slots[r];
  ListWriter sink(p.sink, list), local(p.local, list);
  if (slot < 0) return;
  const int32_t newest = p.positions[r] / p.unit_tokens;
  const FluxionSegments segments = SegmentsOf(p.positions[r]);
  int32_t* places = p.sink_places + list * p.sink.capacity;
  for (int32_t unit = 0; unit * p.unit_tokens < segments.sink; ++unit) {
    const int32_t place = PlaceOf(t, slot, head, newest, unit);
    if (place < 0) KernelCheckFailed("segment lists: a unit of the sink has no place");
    if (newest - unit >= t.ring) TableRow(t.places, slot, place, head)[1] = p.positions[r];
    places[sink.Add(unit)] = place;
  }
  places = p.local_places + list * p.local.capacity;
  if (segments.local == segments.end) return;
  for (int32_t unit = segments.local / p.unit_tokens; unit * p.unit_tokens < segments.end; ++unit) {
    places[local.Add(unit)] = unit % t.ring;
  }
}

void CopyUnits(const int32_t* from, int32_t count, const UnitLists& to, int64_t list) {
  if (count > to.capacity) KernelCheckFailed("a list of units has no room");
  std::memcpy(to.units + list * to.capacity, from, static_cast<size_t>(count) * sizeof(int32_t));
  to.counts[list] = count;
}

// A padded row's list has no unit, whatever its share.
float ShareOf(const DivideListsParams& p, int64_t row, int64_t list) {
  if (p.shares == nullptr || p.slots[row] < 0) return p.share;
  return p.shares[int64_t{p.slots[row]} * p.kv_heads + list % p.kv_heads];
}

}  // namespace

void SegmentLists(const SegmentListsParams& p, Worker worker) {
  const Range mine = Share(int64_t{p.rows} * p.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) ListSegments(p, list);
}

void DivideLists(const DivideListsParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    int64_t units = 0, read = 0;
    for (int64_t list = r * p.kv_heads; list < (r + 1) * p.kv_heads; ++list) {
      const int32_t* from = p.from.units + list * p.from.capacity;
      const int32_t count = p.slots[r] < 0 ? 0 : p.from.counts[list];
      const int32_t cut = FirstUnits(count, ShareOf(p, r, list));
      CopyUnits(from, cut, p.first, list);
      CopyUnits(from + cut, count - cut, p.rest, list);
      units += count;
      read += cut;
    }
    if (p.slots[r] < 0 || p.counters == nullptr) continue;
    p.counters[p.slots[r]].missing += units * p.unit_tokens;
    p.counters[p.slots[r]].read += read * p.unit_tokens;
  }
}

}  // namespace sluice::kernels::cpu
