// The seam of speculative decoding: what guesses the next tokens of a sequence.
//
// A step verifies a sequence's drafts with one decode row more for each of them. Every row chooses
// its token from its own logits with its own draw (UniformFromSeed), as it would alone, and a draft
// counts if it is what the row before it chose. So the tokens are the same with any drafter, and
// with none, whether they are greedy or sampled; a drafter decides only how many of them a step
// gives.
//
// The engine asks for drafts when it has read every token of the sequence, and hands them to the
// step as values. A drafter may make its drafts on the device (device_drafts.h): they come back
// with the results of a step, Learn is told of them, and Propose returns them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"

namespace sluice {

// Drafts for one sequence. Only the engine's thread may call it.
class SequenceDrafter {
 public:
  virtual ~SequenceDrafter() = default;

  // Learns the sequence's tokens, prompt and output: those that were known at the last call, and
  // others behind them. It may leave a part of them to the next call, and then it has no drafts.
  virtual void Follow(absl::Span<const int32_t> tokens) = 0;

  // Learns what the device drafted to follow `tokens`, which are all of the sequence's; none if it
  // could not. Called only if the drafter is on the device, once for each step that gave tokens.
  virtual void Learn(absl::Span<const int32_t> tokens, absl::Span<const int32_t> drafts) {
    (void)tokens;
    (void)drafts;
  }

  // Returns whether drafts are worth a wait for the token that a step under way is choosing: what
  // is known makes them likely.
  virtual bool Expects() const = 0;

  // Writes up to `most` drafts of the tokens that follow those of the last Follow; none if there is
  // nothing to guess by. `drafts` is overwritten; its memory is used again.
  virtual void Propose(int most, std::vector<int32_t>* drafts) const = 0;
};

// Makes the drafters of a node's sequences. Only the engine's thread may call it.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // Returns the name that the setting `speculation` has for it.
  virtual const char* name() const = 0;

  // Returns whether its drafts are those of the model's draft layer, made on the device.
  virtual bool on_device() const { return false; }

  // Returns a drafter for a sequence of at most `total` tokens, its output included.
  virtual std::unique_ptr<SequenceDrafter> Begin(int64_t total) = 0;
};

}  // namespace sluice
