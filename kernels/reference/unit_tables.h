// Lists of units and the tables of residency, as the references read and write them.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/scalar.h"
#include "kernels/sparse_params.h"

namespace sluice::kernels::reference {

// Returns row `row` of a table of int32.
inline int32_t* TableRow(const PagedRows& rows, int64_t slot, int64_t row, int64_t head) {
  return reinterpret_cast<int32_t*>(static_cast<char*>(rows.base) +
                                    RowOffset(rows, slot, row, head));
}

inline void PutList(const UnitLists& lists, int64_t list, const std::vector<int32_t>& units) {
  if (std::ssize(units) > lists.capacity) KernelCheckFailed("a list of units has no room");
  std::copy(units.begin(), units.end(), lists.units + list * lists.capacity);
  lists.counts[list] = static_cast<int32_t>(units.size());
}

inline bool IsPersistent(const ResidencyTable& t, int64_t head) {
  return t.persistent != nullptr && t.persistent[head] != 0;
}

// Returns the place of a unit, or -1, from the tables and the ring.
inline int32_t PlaceOf(const ResidencyTable& t, int64_t slot, int64_t head, int64_t newest,
                       int32_t unit) {
  if (newest - unit < t.ring) return unit % t.ring;
  return IsPersistent(t, head) ? t.ring + unit : *TableRow(t.place_of, slot, unit, head);
}

}  // namespace sluice::kernels::reference
