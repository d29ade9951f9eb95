// LRU warm-up (ESS, section 3.2): which entries a sequence's pool begins with, and when each of
// them was last "used". This file is arithmetic alone.
#pragma once

#include <cstdint>
#include <vector>

#include "src/kv/selection_hints.h"

namespace sluice {

struct WarmEntry {
  int32_t unit = 0;   // A position of the sequence.
  int32_t stamp = 0;  // The newest position that selected the entry.
  friend bool operator==(const WarmEntry&, const WarmEntry&) = default;
};

// Plans the entries that a pool begins with. What the prompt's last positions selected is inserted
// as an LRU pool would have done it, the oldest position first: each entry's stamp is the newest
// position that selected it, and if the pool is too small the oldest entries are left out. The
// newest tokens take the places that the hints leave free, with stamps below all others, so they
// are the first to be evicted.
//
// Hints come from outside. Units at and above `tokens`, other layers, and KV heads other than the
// first are dropped, and positions past the prompt count as its last one. Whatever the hints say, a
// pool begins with entries of the sequence itself.
class WarmPlan {
 public:
  // REQUIRES: `hints` outlives this object.
  WarmPlan(const SelectionHints& hints, int64_t tokens);
  // Returns at most `room` entries of a layer, in ascending order of (stamp, unit). Lower places
  // are evicted first among equal stamps, so an older token goes before a newer one of the same
  // stamp.
  std::vector<WarmEntry> Of(int layer, int64_t room);

 private:
  int32_t PositionOf(const SelectionHints::Entry& entry) const;

  const int64_t hint_tokens_;
  const int64_t tokens_;
  // Sorted by layer, then by position, newest first.
  std::vector<const SelectionHints::Entry*> order_;
  std::vector<uint32_t> taken_by_;  // For each unit, the last call of Of that took it.
  uint32_t call_ = 0;
};

}  // namespace sluice
