// Keeps score of a drafter's guesses, so that it is silent where they are seldom right.
#pragma once

#include <bit>
#include <cstdint>

namespace sluice {

// A step with drafts is not launched ahead and has more rows. So a sequence drafts while at least
// kLeastRight of its last kScored guesses of the next token were right: a step of decode rows reads
// the same weights whether a sequence has one row or four, so one right guess in four pays. Guesses
// are scored whether or not they were asked for, so that a drafter comes back by itself.
class GuessScore {
 public:
  static constexpr int kScored = 16;
  static constexpr int kLeastRight = 4;

  void Add(bool right) { right_ = static_cast<uint16_t>((right_ << 1) | (right ? 1 : 0)); }
  bool good() const { return std::popcount(right_) >= kLeastRight; }

 private:
  // Whether each of the last guesses was right, the newest in bit 0. At first they all count as
  // right, so that drafts begin at once.
  uint16_t right_ = 0xFFFF;
  static_assert(kScored == 16, "right_ has a bit for each guess");
};

}  // namespace sluice
