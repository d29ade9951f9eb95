// Rows of prompts under policy ess: which of them append nothing, since what they would append was
// handed over and they are computed again for what they select alone, and which have their
// selections seen by their sequence's pool, LRU warm-up by what is computed here. Which rows these
// are depends on the prompt alone, not on its chunks, so that what a sequence finds in its pool
// does not depend on its neighbours. Engine's thread.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/device/device.h"

namespace sluice {

class PromptRows {
 public:
  // ESS, section 3.2: "the Top-2K Latent-Cache IDs selected within the last 32 windows".
  static constexpr int32_t kReplayed = 32;

  // RESOURCE_EXHAUSTED: no memory for the rows of a step, of which there are at most `max_rows`.
  static absl::StatusOr<PromptRows> Create(Device* device, int slots, int64_t max_rows);

  // A sequence has moved into the slot. `replays`: its pool sees what its prompt's last rows
  // select.
  void Join(int slot, bool replays);
  // AttentionPolicy::BeginPrompt.
  void Begin(int slot, int64_t tokens, int64_t cached);
  // The slot's rows are decode rows from now on. Rows of the prompt, which had `tokens` tokens,
  // whose selections its pool has seen.
  int64_t End(int slot, int64_t tokens);
  // By slot: past its prompt.
  const std::vector<bool>& generate() const { return generate_; }

  // Before a step of these rows is enqueued.
  void BeginStep(absl::Span<const int32_t> slots, absl::Span<const int32_t> positions);
  // The step's slots by row, -1 of rows that append nothing; null: all append.
  const int32_t* appending() const { return appending_; }
  // Its rows whose selections pools are to see, in their order. Behind a prompt's last row the next
  // token's place is made.
  struct Replay {
    int32_t row;
    bool last;
  };
  absl::Span<const Replay> replays() const { return replays_; }

 private:
  struct Prompt {
    bool replays = false;
    int64_t tokens = 0;    // 0: not known
    int64_t cached = 0;    // rows of these are computed again, and append nothing
    int64_t replayed = 0;  // of its last rows: those whose selections its pool has seen
  };
  PromptRows() = default;
  const int32_t* AppendingSlots(absl::Span<const int32_t> slots,
                                absl::Span<const int32_t> positions);

  std::vector<bool> generate_;   // by slot
  std::vector<Prompt> prompts_;  // by slot
  std::vector<Replay> replays_;
  // Pinned int32 [rows], in turn: at most one step is under way when the next begins.
  std::array<Buffer, 2> buffers_;
  size_t next_ = 0;
  const int32_t* appending_ = nullptr;
};

}  // namespace sluice
