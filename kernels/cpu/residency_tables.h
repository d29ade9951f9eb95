// The tables of residency as the operators on a CPU read and write them.
#pragma once

#include "kernels/cpu/cpu_tables.h"
#include "kernels/cpu/place_heap.h"
#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

// Returns row `row` of a table of int32.
inline int32_t* TableRow(const PagedRows& rows, int64_t slot, int64_t row, int64_t head) {
  return reinterpret_cast<int32_t*>(static_cast<char*>(rows.base) +
                                    RowOffset(rows, slot, row, head));
}

inline bool IsPersistent(const ResidencyTable& t, int64_t head) {
  return t.persistent != nullptr && t.persistent[head] != 0;
}

// Returns the place of a unit, or -1, from the tables and the ring.
inline int32_t PlaceOf(const ResidencyTable& t, int64_t slot, int64_t head, int32_t newest,
                       int32_t unit) {
  if (newest - unit < t.ring) return unit % t.ring;
  return IsPersistent(t, head) ? t.ring + unit : *TableRow(t.place_of, slot, unit, head);
}

// Adds to one list of `lists`, which is empty at first.
class ListWriter {
 public:
  ListWriter(const UnitLists& lists, int64_t list)
      : units_(lists.units + list * lists.capacity),
        count_(lists.counts + list),
        capacity_(lists.capacity) {
    *count_ = 0;
  }
  // Returns the index of the new entry.
  int32_t Add(int32_t unit) {
    if (*count_ == capacity_) KernelCheckFailed("a list of units has no room");
    units_[*count_] = unit;
    return (*count_)++;
  }

 private:
  int32_t* units_;
  int32_t* count_;
  int32_t capacity_;
};

inline void ForgetPlaces(const ResidencyTable& t, int64_t slot, int64_t head) {
  for (int32_t place = t.ring; place < t.count; ++place) {
    int32_t& unit = *TableRow(t.places, slot, place, head);
    if (unit < 0) continue;
    *TableRow(t.place_of, slot, unit, head) = -1;
    unit = -1;
  }
}

// Returns the index of a block, or of a token's K row, among the pieces of that size in `cache`;
// `at` is the unit or place. See RecallParams.
inline int32_t PieceIndex(const PagedCache& c, int64_t slot, int64_t head, int64_t at,
                          int64_t tokens) {
  const bool token = tokens == 1;
  const int64_t block = token ? at / c.block_tokens : at;
  const int64_t piece = HeadBlock(c, slot, block, head);
  if (!token) return static_cast<int32_t>(piece);
  return static_cast<int32_t>(piece * 2 * c.block_tokens + at % c.block_tokens);
}

// Writes that `unit` has the place now, and the unit before it, if there was one, has none.
inline void Assign(const ResidencyTable& t, int64_t slot, int64_t head, int32_t place, int32_t unit,
                   int32_t position) {
  int32_t* row = TableRow(t.places, slot, place, head);
  if (row[0] >= 0) *TableRow(t.place_of, slot, row[0], head) = -1;
  row[0] = unit;
  row[1] = position;
  *TableRow(t.place_of, slot, unit, head) = place;
}

// Returns whether a row at `position` may give the place to another unit.
inline bool MayBeGiven(const ResidencyTable& t, int64_t slot, int64_t head, int32_t place,
                       int32_t position) {
  const int32_t* row = TableRow(t.places, slot, place, head);
  return row[0] != kNoPlace && (row[0] < 0 || row[1] != position);
}

// Returns the stamp by which the place is given: that of its unit, or kFree.
inline int32_t StampOf(const ResidencyTable& t, int64_t slot, int64_t head, int32_t place) {
  const int32_t* row = TableRow(t.places, slot, place, head);
  return row[0] < 0 ? PlaceHeap::kFree : row[1];
}

// Offers the heap every place of the list that may be given.
inline void OfferPlaces(const ResidencyTable& t, int64_t slot, int64_t head, int32_t position,
                        PlaceHeap* heap) {
  for (int32_t place = t.ring; place < t.count; ++place) {
    if (!MayBeGiven(t, slot, head, place, position)) continue;
    heap->Offer(StampOf(t, slot, head, place), place);
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
