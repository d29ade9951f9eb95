// Selection by score: scores become integers of the same order, histograms of whose digits find the
// score of the k-th in time linear in their number.
#pragma once

#include <cstdint>

#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int kDigitBits = 11;
constexpr uint32_t kDigits = 1u << kDigitBits;

// Returns a key that rises with the score; NaN is -inf, and -0 is 0. There are no branches, because
// signs are as good as random.
inline uint32_t KeyOf(float score) {
  constexpr uint32_t kLowest = ~0xFF800000u;  // key of -inf
  const uint32_t bits = __builtin_bit_cast(uint32_t, score + 0.0f);
  const uint32_t negative = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
  const uint32_t key = bits ^ (negative | 0x80000000u);
  const uint32_t is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u ? ~0u : 0u;
  return (key & ~is_nan) | (kLowest & is_nan);
}

// The units that may be chosen by score: [begin, end), without those that are forced.
struct Candidates {
  const float* scores;
  int64_t begin;
  int64_t end;
  uint32_t least;  // smallest key that may be chosen
};

// Calls body(unit, key) for every candidate in order. Keys are made some at a time, in vectors.
template <class Body>
void ForEachKey(const Candidates& c, Body body) {
  constexpr int64_t kAtOnce = 256;
  for (int64_t first = c.begin; first < c.end; first += kAtOnce) {
    uint32_t keys[kAtOnce];
    const int64_t count = Min(kAtOnce, c.end - first);
    for (int64_t i = 0; i < count; ++i) keys[i] = KeyOf(c.scores[first + i]);
    for (int64_t i = 0; i < count; ++i) body(first + i, keys[i]);
  }
}

// A cut takes keys above `key`, and the first `equal` candidates that have it.
struct Cut {
  uint32_t key;
  int64_t equal;

  // REQUIRES: calls come in the order of candidates.
  bool Takes(uint32_t of) { return of > key || (of == key && equal-- > 0); }
};

// The keys of those candidates that share the first digit of the cut's key: few, unless most scores
// are alike.
struct SharedDigit {
  static constexpr int64_t kMost = 1024;
  uint32_t keys[kMost + 1];  // one more, since a key is written before it is counted
  int32_t count = 0;

  // REQUIRES: there are kMost at most.
  SharedDigit(const Candidates& c, uint32_t digit) {
    ForEachKey(c, [&](int64_t, uint32_t key) {
      keys[count] = key;
      count += (key >> (32 - kDigitBits) == digit) & (key >= c.least);
    });
  }
  // Returns how many keys are at least `key`.
  int32_t From(uint32_t key) const {
    int32_t from = 0;
    for (int32_t i = 0; i < count; ++i) from += keys[i] >= key;
    return from;
  }
  // Returns the cut that leaves `wanted` of them, bit by bit from the digit on.
  Cut CutAt(uint32_t digit, int64_t wanted) const {
    uint32_t key = digit << (32 - kDigitBits);
    for (uint32_t bit = 1u << (31 - kDigitBits); bit != 0; bit >>= 1) {
      if (From(key | bit) >= wanted) key |= bit;
    }
    return {key, wanted - (key == ~0u ? 0 : From(key + 1))};
  }
};

// Returns the cut that leaves `wanted` >= 1 candidates, or all where there are fewer.
inline Cut CutOf(const Candidates& c, int64_t wanted) {
  uint32_t prefix = 0;
  for (int shift = 32 - kDigitBits, known = 0;;) {
    uint32_t histogram[kDigits] = {};
    const int width = shift >= 0 ? kDigitBits : kDigitBits + shift;
    const int low = shift >= 0 ? shift : 0;
    const uint32_t mask = (1u << width) - 1;
    if (known == 0) {
      ForEachKey(c, [&](int64_t, uint32_t key) { histogram[key >> low] += key >= c.least; });
    } else {
      ForEachKey(c, [&](int64_t, uint32_t key) {
        if (key >> (32 - known) == prefix) histogram[key >> low & mask] += key >= c.least;
      });
    }
    int64_t digit = mask;
    for (; digit >= 0 && histogram[digit] < wanted; --digit) wanted -= histogram[digit];
    if (digit < 0) return {c.least, c.end};  // there are fewer than wanted
    prefix = prefix << width | static_cast<uint32_t>(digit);
    known += width;
    if (low == 0) return {prefix, wanted};
    if (known == kDigitBits && histogram[digit] <= SharedDigit::kMost) {
      return SharedDigit(c, prefix).CutAt(prefix, wanted);
    }
    shift -= kDigitBits;
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
