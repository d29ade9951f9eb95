#include "src/prefill/prompt_hints.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace sluice {

SelectionHints HintsOf(const PromptSelections::Lists& lists, int layers, int64_t most_tokens) {
  static_assert(PromptSelections::kPositions * 1024 <= kMaxHintEntries, "one each, 1,024 layers");
  const int64_t most = std::min(most_tokens, static_cast<int64_t>(kMaxHintUnits) / layers);
  const auto [first, end] = lists.positions;
  SelectionHints hints;
  hints.unit_tokens = 1;
  // The entry of a token is 1 + the last layer whose hints name it.
  std::vector<int> named(static_cast<size_t>(end), 0);
  for (int layer = 0; layer < layers; ++layer) {
    int64_t left = most;
    for (int64_t position = end - 1; position >= first && left > 0; --position) {
      SelectionHints::Entry entry;
      entry.layer = static_cast<uint32_t>(layer);
      entry.position = static_cast<uint32_t>(position);
      for (const int32_t token : lists.Of(layer, position)) {
        // A failed device may leave anything in its memory.
        if (token < 0 || token > position || left == 0) continue;
        if (std::exchange(named[static_cast<size_t>(token)], layer + 1) == layer + 1) continue;
        entry.units.push_back(static_cast<uint32_t>(token));
        --left;
      }
      if (!entry.units.empty()) hints.entries.push_back(std::move(entry));
    }
  }
  return hints;
}

}  // namespace sluice
