// A drafter for benches that knows how sequences go on: each of its drafts is right with a given
// probability, whatever the model. So a bench with formula weights can show what speculation is
// worth at an acceptance that is stated and not a model's.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "src/engine/drafter.h"

namespace sluice::bench {

class KnownDrafter : public Drafter {
 public:
  struct Options {
    uint64_t seed = 1;
    int32_t vocab = 2;         // More than 1, so that every token has a wrong one beside it.
    double probability = 0.7;  // Of each draft to be right.
    bool on_device = false;    // Whether the model's draft layer runs too; its drafts are dropped.
    int64_t context = 0;       // Tokens of every prompt, whose last one is the sequence's number.
    // Tokens of each sequence behind its prompt, by its number. There are no drafts behind them.
    std::vector<std::vector<int32_t>> known;
  };
  // Sums over all sequences, as their tokens showed.
  struct Counts {
    int64_t judged = 0;  // Drafts whose earlier drafts of the same step were all right.
    int64_t right = 0;   // Those of them that became tokens.
  };
  explicit KnownDrafter(Options options);

  const char* name() const override { return "known"; }
  bool on_device() const override { return options_.on_device; }
  std::unique_ptr<SequenceDrafter> Begin(int64_t total) override;
  // REQUIRES: the engine has ended.
  const Counts& counts() const { return counts_; }

  // Returns the draft of a position behind the prompt, which depends on the seed, the sequence and
  // the position alone. REQUIRES: the position is known.
  int32_t DraftAt(size_t sequence, size_t position) const;

 private:
  class Guesses;

  const Options options_;
  Counts counts_;
};

}  // namespace sluice::bench
