#include "src/engine/ngram_drafter.h"

#include <algorithm>
#include <array>
#include <bit>

#include "src/base/status_macros.h"
#include "src/engine/guess_score.h"

namespace sluice {
namespace {

constexpr int kLengths = kMostNgram - kLeastNgram + 1;

class NgramSequence : public SequenceDrafter {
 public:
  explicit NgramSequence(uint64_t total) : shift_(64 - std::countr_zero(BucketsFor(total))) {
    for (auto& table : followers_) table.assign(BucketsFor(total), Bucket());
    tokens_.reserve(total);
  }

  void Follow(absl::Span<const int32_t> tokens) override {
    const size_t most = tokens_.size() + static_cast<size_t>(kIndexedAtOnce);
    complete_ = tokens.size() <= most;
    for (const int32_t token :
         tokens.subspan(tokens_.size(), complete_ ? tokens.npos : kIndexedAtOnce)) {
      Take(token);
    }
  }

  bool Expects() const override { return complete_ && guess_ > 0 && score_.good(); }

  void Propose(int most, std::vector<int32_t>* drafts) const override {
    drafts->clear();
    if (!Expects()) return;
    for (int i = 0; i < most; ++i) {
      const size_t at = static_cast<size_t>(guess_) + static_cast<size_t>(i);
      drafts->push_back(at < tokens_.size() ? tokens_[at] : (*drafts)[at - tokens_.size()]);
    }
  }

 private:
  // Positions behind n-grams, each behind the newest occurrence of its n-gram; 0: none.
  using Bucket = std::array<int32_t, 4>;

  // Returns the buckets of a table, a power of two. At most half of their entries are ever taken,
  // so few buckets overflow.
  static uint64_t BucketsFor(uint64_t total) {
    return std::bit_ceil(std::max<uint64_t>(total / 2, 2));
  }

  // Returns the bucket of the last `length` tokens.
  Bucket& BucketOf(int length) {
    uint64_t hash = 0;
    for (auto it = tokens_.end() - length; it != tokens_.end(); ++it) {
      hash = (hash ^ static_cast<uint32_t>(*it)) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 32;
    }
    return followers_[static_cast<size_t>(length - kLeastNgram)]
                     [static_cast<size_t>((hash * 0x9E3779B97F4A7C15ull) >> shift_)];
  }

  // Returns whether the `length` tokens before position `follower` are the last ones.
  bool Same(int32_t follower, int length) const {
    return follower >= length &&
           std::equal(tokens_.end() - length, tokens_.end(), tokens_.begin() + (follower - length));
  }

  void Take(int32_t token) {
    if (guess_ > 0) score_.Add(tokens_[static_cast<size_t>(guess_)] == token);
    tokens_.push_back(token);
    guess_ = 0;
    const auto end = static_cast<int32_t>(tokens_.size());
    for (int length = kMostNgram; length >= kLeastNgram; --length) {
      if (end < length) continue;
      Bucket& bucket = BucketOf(length);
      auto entry = std::find_if(bucket.begin(), bucket.end(),
                                [&](int32_t follower) { return Same(follower, length); });
      if (entry == bucket.end()) {
        // The oldest entry goes. A lost one costs a draft, and never gives a wrong one.
        entry = std::min_element(bucket.begin(), bucket.end());
      } else if (guess_ == 0) {
        guess_ = *entry;
      }
      *entry = end;
    }
  }

  const int shift_;
  std::array<std::vector<Bucket>, kLengths> followers_;  // by length, by hash of the n-gram
  std::vector<int32_t> tokens_;
  bool complete_ = false;  // whether tokens_ are all that are known
  int32_t guess_ = 0;      // the position of the token that is to be the next one; 0: no guess
  GuessScore score_;
};

class NgramDrafter : public Drafter {
 public:
  const char* name() const override { return "ngram"; }
  std::unique_ptr<SequenceDrafter> Begin(int64_t total) override {
    SLUICE_CHECK(total > 0);
    return std::make_unique<NgramSequence>(static_cast<uint64_t>(total));
  }
};

}  // namespace

std::unique_ptr<Drafter> NewNgramDrafter() { return std::make_unique<NgramDrafter>(); }

}  // namespace sluice
