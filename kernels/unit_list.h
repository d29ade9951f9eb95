// A list of units as a sequence of tokens of its own: *list token* v is token v % unit_tokens of
// the list's unit v / unit_tokens. Units ascend, so the tokens up to the row's position are the
// first `tokens` of them.
#pragma once

#include "kernels/scalar.h"

namespace sluice::kernels {
namespace {

struct UnitList {
  const int32_t* units = nullptr;   // null: unit i is i
  const int32_t* places = nullptr;  // places of the units; null only if `units` is
  int64_t unit_tokens = 1;
  int64_t tokens = 0;
};

// Returns the list of (row, KV head). A padded row's list has no tokens.
template <typename Params>
constexpr UnitList UnitListOf(const Params& p, int64_t row, int64_t kv_head) {
  const int64_t index = row * p.cache.kv_heads + kv_head;
  const int64_t first = index * p.capacity;
  UnitList list;
  list.unit_tokens = p.unit_tokens;
  if (p.units != nullptr) list.units = p.units + first;
  list.places = p.places != nullptr ? p.places + first : list.units;
  if (p.slots[row] < 0) return list;
  int64_t count = Max(0, Min(p.counts[index], p.capacity));
  if (list.units == nullptr) {
    list.tokens = count * list.unit_tokens;
    return list;
  }
  const int64_t context = int64_t{p.positions[row]} + 1;
  while (count > 0 && list.units[count - 1] * list.unit_tokens >= context) --count;
  if (count == 0) return list;
  const int64_t newest = list.units[count - 1];
  list.tokens =
      (count - 1) * list.unit_tokens + Min(list.unit_tokens, context - newest * list.unit_tokens);
  return list;
}

// Returns the index of list token v among the cache's tokens.
constexpr int64_t PlaceOfToken(const UnitList& list, int64_t v) {
  const int64_t i = v / list.unit_tokens;
  return (list.places != nullptr ? list.places[i] : i) * list.unit_tokens + v % list.unit_tokens;
}

// Returns the position of list token v in the sequence.
constexpr int64_t PositionOfToken(const UnitList& list, int64_t v) {
  const int64_t i = v / list.unit_tokens;
  return (list.units != nullptr ? list.units[i] : i) * list.unit_tokens + v % list.unit_tokens;
}

}  // namespace
}  // namespace sluice::kernels
