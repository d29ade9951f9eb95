// Hints name the units (blocks or tokens) of a handed-over cache that its prefill node found
// important, so that a sequence begins with them in HBM. They change where a sequence begins, never
// what it computes in the end. A policy that has no use for them drops them.
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
    std::optional<uint32_t> kv_head;   // none: all KV heads of the layer
    std::optional<uint32_t> position;  // the row that selected them; none: the prompt's last
    // In ascending order. Unit u is the tokens [u * unit_tokens, (u + 1) * unit_tokens).
    std::vector<uint32_t> units;
  };
  uint32_t unit_tokens = 0;
  std::vector<Entry> entries;
  // The queries of the prompt's last row after RoPE, [layers][heads][head_dim]; empty: not given.
  std::vector<float> queries;

  bool empty() const { return entries.empty() && queries.empty(); }
  // Returns the memory that the hints take.
  size_t bytes() const;
};

// Limits for all entries of one Commit together. The units take 4 MiB, which is 17,189 tokens for
// each of 61 layers. That holds what 32 rows selected with 2,048 tokens each, every token named
// once, unless a row has 480 or more tokens that the row before it had not.
inline constexpr int kMaxHintEntries = 1 << 16;
inline constexpr size_t kMaxHintUnits = size_t{1} << 20;
// The largest message with that many: up to 5 bytes for a number, plus tags and lengths of entries.
inline constexpr size_t kMaxHintMessageBytes = 5 * kMaxHintUnits + 32 * size_t{kMaxHintEntries};

// The bounds that the hints of a transfer have to keep.
struct HintBounds {
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t block_tokens = 0;
  uint32_t context_length = 0;  // tokens that units may cover
  // The most tokens that an entry's units may cover; 0: all of the context.
  int64_t most_tokens = 0;
  // The numbers of `queries`; 0: any.
  int64_t queries = 0;
};
// Returns INVALID_ARGUMENT, which names the field ("hints.entries[3].units") and the remedy.
absl::Status CheckHints(const SelectionHints& hints, const HintBounds& bounds);

// The heads of a divided model that a rank has. 0 KV heads: ranks divide no heads.
struct HintPart {
  uint32_t first = 0, count = 0;  // KV heads
  // Query heads, of the model's `query_heads` with `head_dim` numbers each.
  uint32_t first_query = 0, query_count = 0;
  uint32_t query_heads = 0, head_dim = 0;

  // Returns how many numbers the model's queries have, where a rank's have `own`.
  int64_t QueriesOfAll(int64_t own) const {
    return count == 0 ? own : own / query_count * query_heads;
  }
};
// Returns what hints of the whole model say of a rank's heads, by the rank's numbers.
SelectionHints HintsOf(const SelectionHints& hints, const HintPart& part);

// Lists the units, of `unit_tokens` tokens each, that the hints name for a layer and KV head: the
// newest row's units first, each row's in ascending order, and none twice.
class HintedUnits {
 public:
  // Units at and above `end` are left out. REQUIRES: `hints` passed CheckHints and outlives this.
  HintedUnits(const SelectionHints& hints, int64_t unit_tokens, int64_t end);
  // Appends to `taken` up to `most` units of this layer and KV head that it does not have yet.
  void Append(uint32_t layer, uint32_t kv_head, size_t most, std::vector<int32_t>* taken);

 private:
  const int64_t hint_tokens_;
  const int64_t unit_tokens_;
  std::vector<const SelectionHints::Entry*> order_;  // by layer, then newest row first
  // The last call that took a unit, by unit.
  std::vector<uint32_t> taken_by_;
  uint32_t call_ = 0;
};

}  // namespace sluice
