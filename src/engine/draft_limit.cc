#include "src/engine/draft_limit.h"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "src/base/status_macros.h"

namespace sluice {
namespace {

// Shares are averages over about so many steps of sequences.
constexpr double kMemory = 256;
// The share of accepted drafts that is assumed at each position before a step was seen.
constexpr double kUnknownShare = 0.5;

}  // namespace

DraftLimit::DraftLimit(int most) : most_(most) {
  SLUICE_CHECK(most >= 0 && most <= kMost);
  accepted_.fill(kUnknownShare);
}

int DraftLimit::GroupOf(int sequences) {
  // Half octaves: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, ..
  const auto below = static_cast<unsigned>(std::max(sequences, 1) - 1);
  const int octave = std::bit_width(below);
  const bool upper = octave >= 2 && (below >> (octave - 2) & 1) != 0;
  return 2 * octave + (upper ? 1 : 0);
}

int DraftLimit::Of(int sequences) const {
  const Group& group = groups_[static_cast<size_t>(GroupOf(sequences))];
  if (group.limit < 0) return most_;
  return group.trial >= 0 ? group.trial : group.limit;
}

double DraftLimit::Times::Median() const {
  std::array<double, kTimes> sorted = seconds;
  const auto end = sorted.begin() + std::min<int64_t>(count, kTimes);
  const auto middle = sorted.begin() + (end - sorted.begin()) / 2;
  std::nth_element(sorted.begin(), middle, end);
  return *middle;
}

double DraftLimit::Tokens(int limit) const {
  double tokens = 1;
  for (int i = 0; i < limit; ++i) tokens += accepted_[static_cast<size_t>(i)];
  return tokens;
}

void DraftLimit::Note(int sequences, int limit, int decoded, absl::Span<const int> accepted,
                      absl::Duration time) {
  if (decoded < 1 || most_ == 0) return;
  const double weight = decoded / (decoded + kMemory);
  for (int i = 0; i < limit; ++i) {
    double& share = accepted_[static_cast<size_t>(i)];
    share += weight * (accepted[static_cast<size_t>(i)] / static_cast<double>(decoded) - share);
  }
  Group& group = groups_[static_cast<size_t>(GroupOf(sequences))];
  if (group.limit < 0) group.limit = most_;
  // A step that was launched before the limit changed says nothing of it.
  if (limit != (group.trial >= 0 ? group.trial : group.limit)) return;
  if (group.trial < 0 || group.left <= kTimes) {
    Times& times = group.times[static_cast<size_t>(limit)];
    times.seconds[static_cast<size_t>(times.count++ % kTimes)] = absl::ToDoubleSeconds(time);
  }
  if (--group.left > 0) return;
  group.trial >= 0 ? EndTrial(group) : BeginTrial(group);
}

void DraftLimit::BeginTrial(Group& group) const {
  if (group.limit + group.direction < 0 || group.limit + group.direction > most_) {
    group.direction = -group.direction;
  }
  group.trial = group.limit + group.direction;
  group.times[static_cast<size_t>(group.trial)].count = 0;
  group.left = kTrialSteps;
}

void DraftLimit::EndTrial(Group& group) const {
  const auto rate = [&](int limit) {
    return Tokens(limit) / group.times[static_cast<size_t>(limit)].Median();
  };
  const bool better = rate(group.trial) > kLeastGain * rate(group.limit);
  if (better) {
    group.limit = group.trial;  // The next trial goes on in the same direction.
    group.failed = 0;
    group.wait = kLeastWait;
  } else {
    group.direction = -group.direction;
    // At either end there is one direction only.
    const bool both = ++group.failed >= 2 || group.limit == 0 || group.limit == most_;
    if (both) {
      group.failed = 0;
      group.wait = std::min(2 * group.wait, kMostWait);
    }
  }
  group.trial = -1;
  group.left = better ? kTimes + 1 : group.wait;
}

}  // namespace sluice
