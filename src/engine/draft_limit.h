// Chooses how many drafts a sequence may bring to a step, by what steps gave and how long they
// took. A draft costs a row. Rows are nearly free while a step waits for weights and caches, and
// dear where it computes, as in large batches or where each row reads experts of its own; then
// fewer drafts, or none, give more tokens a second. No answer depends on the choice.
//
// It climbs: now and then some steps have one draft more or less, and if tokens a second grew by
// kLeastGain the limit stays there. Such trials become rarer while nothing is gained.
#pragma once

#include <array>
#include <cstdint>

#include "absl/time/time.h"
#include "absl/types/span.h"

namespace sluice {

class DraftLimit {
 public:
  // `most` is the largest limit, and the one that it begins with. REQUIRES: most <= kMost.
  static constexpr int kMost = 15;
  explicit DraftLimit(int most);

  // Returns the drafts that each sequence may bring to a step of so many sequences.
  int Of(int sequences) const;

  // Notes a step of decode rows alone for which Of(sequences) was `limit`. `decoded` of the
  // sequences had rows in it, and accepted[i] of those had their draft at position i accepted; it
  // has `limit` entries or more.
  void Note(int sequences, int limit, int decoded, absl::Span<const int> accepted,
            absl::Duration time);

  static constexpr double kLeastGain = 1.03;
  // Steps of a trial, the first of which are not timed: the device may record a step of another
  // number of rows.
  static constexpr int kTrialSteps = 12;
  static constexpr int kUntimedSteps = 4;
  // Steps from one trial to the next.
  static constexpr int kLeastWait = 32;
  static constexpr int kMostWait = 2048;

 private:
  static constexpr int kTimes = kTrialSteps - kUntimedSteps;
  // Newest times of the steps with one limit.
  struct Times {
    std::array<double, kTimes> seconds{};
    int64_t count = 0;
    double Median() const;
  };
  // Steps of like numbers of sequences.
  struct Group {
    int limit = -1;  // -1: no step was noted
    int trial = -1;  // the limit that is tried; -1: none
    int direction = -1;
    int failed = 0;         // trials in a row that gained nothing
    int left = kLeastWait;  // steps to the next trial, or of this one
    int wait = kLeastWait;
    std::array<Times, kMost + 1> times;  // by limit
  };
  static int GroupOf(int sequences);
  // Tokens that a sequence is expected to get from a step.
  double Tokens(int limit) const;
  void BeginTrial(Group& group) const;
  void EndTrial(Group& group) const;

  const int most_;
  // Share of the sequences that had a draft accepted, by position.
  std::array<double, kMost> accepted_;
  std::array<Group, 64> groups_;
};

}  // namespace sluice
