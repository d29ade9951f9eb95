// Draws hints of a prefill node: what the request's first rows will look for.
#pragma once

#include <cstdint>

#include "src/base/rng.h"
#include "src/kv/selection_hints.h"

namespace sluice::sim {

// The limits of what may be hinted at.
struct HintShape {
  uint32_t context = 0;       // tokens handed over
  uint32_t block_tokens = 0;  // tokens of a block
  int64_t places = 0;         // tokens that an entry names at most; 0: any number
  int64_t queries = 0;        // values of the queries that the policy takes; 0: it takes none
};

// Returns hints with any tokens for any rows, and any queries, sometimes with one that is not a
// number.
SelectionHints DrawHints(SplitMix64& random, const HintShape& shape);

}  // namespace sluice::sim
