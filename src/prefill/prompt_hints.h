// Hints made of what the last positions of a prompt selected (sparse attention's indexer): the
// tokens whose entries a decode node begins with in HBM. A least-recently-used set that is given
// each with the newest position that selected it is what it would be had it seen those rows (ESS,
// arXiv 2512.10576, LRU warm-up).
#pragma once

#include <cstdint>

#include "src/attention/latent/prompt_selections.h"
#include "src/kv/selection_hints.h"

namespace sluice {

// Each token once, with the newest position that selected it, newest positions first; of each layer
// no more than `most_tokens`, and of all no more than kMaxHintUnits: the oldest positions' are left
// out.
SelectionHints HintsOf(const PromptSelections::Lists& lists, int layers, int64_t most_tokens);

}  // namespace sluice
