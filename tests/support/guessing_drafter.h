// A drafter that knows how sequences go on, and is wrong as often as a test wants: drafts that are
// accepted up to any place, whatever the model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "src/base/rng.h"
#include "src/engine/drafter.h"

namespace sluice::testing {

class GuessingDrafter : public Drafter {
 public:
  struct Options {
    uint64_t seed = 1;
    int32_t vocab = 1;
    double right = 0.75;   // share of drafts that are right, where the sequence is known
    double silent = 0.15;  // share of calls that give no drafts
    std::vector<std::vector<int32_t>> known;  // whole sequences: prompt and output
  };
  explicit GuessingDrafter(Options options) : options_(std::move(options)) {}

  const char* name() const override { return "guess"; }
  std::unique_ptr<SequenceDrafter> Begin(int64_t) override {
    return std::make_unique<Guesses>(&options_);
  }

 private:
  class Guesses : public SequenceDrafter {
   public:
    explicit Guesses(const Options* options) : options_(options) {}
    void Follow(absl::Span<const int32_t> tokens) override {
      tokens_.assign(tokens.begin(), tokens.end());
    }
    bool Expects() const override { return Draws()() % 4 != 0; }
    void Propose(int most, std::vector<int32_t>* drafts) const override {
      drafts->clear();
      SplitMix64 random = Draws();
      if (random.Uniform() < options_->silent) return;
      const std::vector<int32_t>* const whole = Whole();
      const size_t count = 1 + random.Below(static_cast<uint64_t>(most));
      for (size_t at = tokens_.size(); drafts->size() < count; ++at) {
        const bool right = random.Uniform() < options_->right;
        const auto wrong =
            static_cast<int32_t>(random.Below(static_cast<uint64_t>(options_->vocab)));
        const bool known = whole != nullptr && at < whole->size();
        drafts->push_back(known && right ? (*whole)[at] : wrong);
      }
    }

   private:
    // Draws depend on the tokens alone.
    SplitMix64 Draws() const {
      SplitMix64 random(options_->seed ^ tokens_.size() ^
                        (static_cast<uint64_t>(tokens_.back()) << 32));
      random();
      return random;
    }
    const std::vector<int32_t>* Whole() const {
      for (const std::vector<int32_t>& known : options_->known) {
        if (known.size() > tokens_.size() &&
            std::equal(tokens_.begin(), tokens_.end(), known.begin())) {
          return &known;
        }
      }
      return nullptr;
    }

    const Options* const options_;
    std::vector<int32_t> tokens_;
  };

  const Options options_;
};

}  // namespace sluice::testing
