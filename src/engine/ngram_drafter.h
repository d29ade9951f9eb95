// Drafts by prompt lookup: where the last few tokens occurred before, the tokens that followed them
// are likely to follow again. It needs no model, and serves every family and device.
#pragma once

#include <cstdint>
#include <memory>

#include "src/engine/drafter.h"

namespace sluice {

// Lengths of the suffixes that are looked up, the longest first.
inline constexpr int kMostNgram = 4;
inline constexpr int kLeastNgram = 2;

// Drafts what followed the newest earlier occurrence of the longest suffix, of kMostNgram tokens
// down to kLeastNgram, that has one. What follows may run into the suffix itself, so that a loop is
// drafted as long as one likes.
//
// A sequence's index has 8 bytes for each token and length, rounded up to a power of two, and takes
// a few reads and writes for each token. A long prompt is indexed over several steps,
// kIndexedAtOnce tokens in each, so that no step waits long for it.
//
// The drafter keeps score: for every token that it knew a guess for, whether or not it was asked,
// it notes if the guess was right. While too few of the last guesses were, it has no drafts, since
// a step with drafts is not launched ahead and has more rows. Guesses go on, so that it comes back
// by itself where the text repeats again. All this depends on the sequence's tokens alone: neither
// on timing nor on other sequences.
std::unique_ptr<Drafter> NewNgramDrafter();

inline constexpr int64_t kIndexedAtOnce = 4096;

}  // namespace sluice
