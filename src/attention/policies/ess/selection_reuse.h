// SelectionReuse counts how many entries a sequence would miss in pools of other sizes, from what
// its rows select. A pool takes places from the entries used longest ago, so an entry has a place
// if as many others or fewer were used since: one record of selections tells the misses of every
// size (Mattson et al., "Evaluation techniques for storage hierarchies", 1970). This file is
// arithmetic alone.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "src/attention/miss_profile.h"

namespace sluice {

class SelectionReuse {
 public:
  // Places per token of the pools that are counted.
  static constexpr std::array<double, 7> kRatios = {0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6};
  // The first steps of a sequence are not counted: nothing is known of what was used before.
  static constexpr int kWarmSteps = 128;
  // Counted steps that are enough, over all sequences.
  static constexpr int kCountedSteps = 128;

  // A row selects at most `top_k` entries of each of `layers` layers.
  SelectionReuse(int layers, int top_k);

  // Begins with another sequence.
  void Begin();
  // Adds a step of the sequence, which has `tokens` tokens, that of the step included. `selected`
  // is int32 [layers][top_k]: the positions that each layer selected, min(tokens, top_k) of them.
  // REQUIRES: positions lie in [0, tokens), and there are more tokens than in the step before,
  // which need not be the sequence's own step before.
  void Add(int64_t tokens, absl::Span<const int32_t> selected);

  // Returns whether enough steps were counted.
  bool done() const { return counted_ >= kCountedSteps; }
  // Returns what a sequence misses in a step, by ratio and layer. An entry that was not used since
  // the sequence began counts as missed, so that large pools may look worse than they are.
  // REQUIRES: done().
  std::vector<MissProfile::Point> Points() const;

 private:
  struct Layer {
    std::vector<int32_t> last;  // [tokens] the step that last used the entry; -1: none
    std::vector<int64_t> used;  // [steps] entries that were last used by the step
    std::array<int64_t, kRatios.size()> missed = {};
  };
  void Use(Layer& layer, size_t entry);

  const int top_k_;
  std::vector<Layer> layers_;
  int steps_ = 0;        // of this sequence
  int64_t before_ = 0;   // its tokens in the step before; 0: this is its first
  int64_t counted_ = 0;  // steps of all sequences
  int64_t tokens_ = 0;   // sum over counted steps
  // Entries that the step looks up, by the step that last used them, and entries used since then.
  std::vector<int64_t> lookups_, since_;
};

}  // namespace sluice
