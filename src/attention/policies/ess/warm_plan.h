// LRU warm-up (ESS, section 3.2): which entries a sequence's pool begins with, and when each of
// them was "used" last. Arithmetic alone.
#pragma once

#include <cstdint>
#include <vector>

#include "src/kv/selection_hints.h"

namespace sluice {

struct WarmEntry {
  int32_t unit = 0;   // a position
  int32_t stamp = 0;  // the newest position that selected it
  friend bool operator==(const WarmEntry&, const WarmEntry&) = default;
};

// What the prompt's last positions selected, inserted oldest position first: the state that an LRU
// pool has after them is that each entry's stamp is the newest position that selected it, and where
// the pool is too small the oldest are gone. What hints leave free the newest tokens take, with
// stamps below all others: they are the first to go.
//
// Hints are what somebody sent. Units at and above `tokens`, other layers and other heads than the
// first are dropped, positions past the prompt count as its last: whatever they say, a pool begins
// with entries of the sequence itself.
class WarmPlan {
 public:
  // `hints` outlives this.
  WarmPlan(const SelectionHints& hints, int64_t tokens);
  // The entries of a layer, at most `room`, in ascending order of (stamp, unit): lower places go
  // first among equals, so an older token of the same stamp goes before a newer one.
  std::vector<WarmEntry> Of(int layer, int64_t room);

 private:
  int32_t PositionOf(const SelectionHints::Entry& entry) const;

  const int64_t hint_tokens_;
  const int64_t tokens_;
  std::vector<const SelectionHints::Entry*> order_;  // by layer, then newest first
  std::vector<uint32_t> taken_by_;                   // by unit: the last call that took it
  uint32_t call_ = 0;
};

}  // namespace sluice
