// Makes hints from what the last positions of a prompt selected (the indexer of sparse attention):
// the tokens whose entries a decode node begins with in HBM. A least-recently-used set that is
// given each token with the newest position that selected it is the same as if it had seen those
// rows (ESS, arXiv 2512.10576, LRU warm-up).
#pragma once

#include <cstdint>

#include "src/attention/latent/prompt_selections.h"
#include "src/kv/selection_hints.h"

namespace sluice {

// Returns each token once, with the newest position that selected it, newest positions first. There
// are no more than `most_tokens` tokens of a layer and kMaxHintUnits of all layers; the oldest
// positions are left out.
SelectionHints HintsOf(const PromptSelections::Lists& lists, int layers, int64_t most_tokens);

}  // namespace sluice
