// Hints: the units of a handed-over cache that its prefill node found important, so that a sequence
// begins with them in HBM. They change where a sequence begins, never what it computes in the end:
// a policy that has no use for them drops them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"

namespace sluice {

struct SelectionHints {
  struct Entry {
    uint32_t layer = 0;
    std::optional<uint32_t> kv_head;   // none: all of the layer
    std::optional<uint32_t> position;  // whose row found them important; none: the prompt's last
    // Ascending; unit u is tokens [u * unit_tokens, (u + 1) * unit_tokens).
    std::vector<uint32_t> units;
  };
  uint32_t unit_tokens = 0;
  std::vector<Entry> entries;

  bool empty() const { return entries.empty(); }
  // Of memory.
  size_t bytes() const;
};

// Of all entries of one Commit, in 4 MiB. Of 61 layers that is 17,189 tokens each. What 32 rows
// with 2,048 each selected, every token named once, is less wherever a row has fewer than 480 that
// the row before had not.
inline constexpr int kMaxHintEntries = 1 << 16;
inline constexpr size_t kMaxHintUnits = size_t{1} << 20;
// Of a message with as many: up to 5 bytes a number, and tags and lengths of entries.
inline constexpr size_t kMaxHintMessageBytes = 5 * kMaxHintUnits + 32 * size_t{kMaxHintEntries};

// What hints may say.
struct HintBounds {
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t block_tokens = 0;
  uint32_t context_length = 0;  // tokens that units may cover
  // Tokens of an entry's units at most; 0: as many as there are.
  int64_t most_tokens = 0;
};
// INVALID_ARGUMENT names the field ("hints.entries[3].units") and the remedy.
absl::Status CheckHints(const SelectionHints& hints, const HintBounds& bounds);

// The units, of `unit_tokens` tokens, that the hints name for one layer and KV head after the
// other: those of the newest row first, each row's in ascending order, none twice.
class HintedUnits {
 public:
  // `end`: units at and above it are left out. `hints` passed CheckHints and outlives this.
  HintedUnits(const SelectionHints& hints, int64_t unit_tokens, int64_t end);
  // Appends up to `most` units that are not yet among those of this (layer, head): what `taken`
  // holds is not named again.
  void Append(uint32_t layer, uint32_t kv_head, size_t most, std::vector<int32_t>* taken);

 private:
  const int64_t hint_tokens_;
  const int64_t unit_tokens_;
  std::vector<const SelectionHints::Entry*> order_;  // by layer, then newest first
  // By unit: the last call that took it.
  std::vector<uint32_t> taken_by_;
  uint32_t call_ = 0;
};

}  // namespace sluice
