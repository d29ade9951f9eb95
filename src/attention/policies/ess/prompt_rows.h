// Rows of prompts under policy ess. Some rows are computed again only for what they select: their
// entries were handed over, so they append nothing. Some rows have their selections shown to their
// sequence's pool, which is LRU warm-up by what is computed here. Which rows these are depends on
// the prompt alone and not on its chunks, so that a sequence's pool does not depend on its
// neighbours. Only the engine's thread calls it.
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

  // RESOURCE_EXHAUSTED: there is no memory for the rows of a step, of which there are at most
  // `max_rows`.
  static absl::StatusOr<PromptRows> Create(Device* device, int slots, int64_t max_rows);

  // Must be called when a sequence moves into the slot. With `replays`, its pool is shown what its
  // prompt's last rows select.
  void Join(int slot, bool replays);
  // Has the contract of AttentionPolicy::BeginPrompt.
  void Begin(int slot, int64_t tokens, int64_t cached);
  // The slot's rows are decode rows from now on. Returns how many rows of the prompt, which had
  // `tokens` tokens, had their selections shown to the pool.
  int64_t End(int slot, int64_t tokens);
  // For each slot, whether its prompt has ended.
  const std::vector<bool>& generate() const { return generate_; }

  // Must be called before a step of these rows is enqueued.
  void BeginStep(absl::Span<const int32_t> slots, absl::Span<const int32_t> positions);
  // Returns the step's slots by row, with -1 for rows that append nothing, or null if all rows
  // append.
  const int32_t* appending() const { return appending_; }
  // The step's rows whose selections pools are shown, in their order. After the `last` row of a
  // prompt the next token's place is reserved.
  struct Replay {
    int32_t row;
    bool last;
  };
  absl::Span<const Replay> replays() const { return replays_; }

 private:
  struct Prompt {
    bool replays = false;
    int64_t tokens = 0;    // 0: not known.
    int64_t cached = 0;    // Rows of these positions are computed again, and append nothing.
    int64_t replayed = 0;  // How many of the last rows have had their selections shown to the pool.
  };
  PromptRows() = default;
  const int32_t* AppendingSlots(absl::Span<const int32_t> slots,
                                absl::Span<const int32_t> positions);

  std::vector<bool> generate_;   // Indexed by slot.
  std::vector<Prompt> prompts_;  // Indexed by slot.
  std::vector<Replay> replays_;
  // Pinned int32 [rows], used in turn: at most one step is under way when the next begins.
  std::array<Buffer, 2> buffers_;
  size_t next_ = 0;
  const int32_t* appending_ = nullptr;
};

}  // namespace sluice
