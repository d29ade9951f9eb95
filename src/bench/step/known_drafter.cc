#include "src/bench/step/known_drafter.h"

#include <algorithm>
#include <utility>

#include "src/base/rng.h"

namespace sluice::bench {

class KnownDrafter::Guesses : public SequenceDrafter {
 public:
  explicit Guesses(KnownDrafter* drafter) : drafter_(drafter) {}

  void Follow(absl::Span<const int32_t> tokens) override {
    const auto context = static_cast<size_t>(drafter_->options_.context);
    if (context == 0 || tokens.size() < context) return;
    sequence_ = static_cast<size_t>(tokens[context - 1]);
    const size_t now = tokens.size() - context;
    // A step's drafts are judged up to the first that is wrong, whose place has another token now.
    for (; proposed_ > 0 && at_ < now; ++at_, --proposed_) {
      ++drafter_->counts_.judged;
      if (drafter_->DraftAt(sequence_, at_) != tokens[context + at_]) break;
      ++drafter_->counts_.right;
    }
    if (at_ < now) proposed_ = 0;
    at_ = now;
  }

  bool Expects() const override { return at_ < Known(); }

  void Propose(int most, std::vector<int32_t>* drafts) const override {
    drafts->clear();
    const size_t end = std::min(at_ + static_cast<size_t>(most), Known());
    for (size_t i = at_; i < end; ++i) drafts->push_back(drafter_->DraftAt(sequence_, i));
    proposed_ = drafts->size();
  }

 private:
  size_t Known() const {
    const auto& known = drafter_->options_.known;
    return sequence_ < known.size() ? known[sequence_].size() : 0;
  }

  KnownDrafter* const drafter_;
  size_t sequence_ = 0;
  size_t at_ = 0;                // Tokens behind the prompt.
  mutable size_t proposed_ = 0;  // Drafts from at_ on that no token has judged yet.
};

KnownDrafter::KnownDrafter(Options options) : options_(std::move(options)) {}

std::unique_ptr<SequenceDrafter> KnownDrafter::Begin(int64_t) {
  return std::make_unique<Guesses>(this);
}

int32_t KnownDrafter::DraftAt(size_t sequence, size_t position) const {
  SplitMix64 of_sequence(options_.seed + sequence);
  SplitMix64 random(of_sequence() + position);
  const int32_t right = options_.known[sequence][position];
  return random.Uniform() < options_.probability ? right : (right + 1) % options_.vocab;
}

}  // namespace sluice::bench
