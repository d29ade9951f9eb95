// The selections of the last positions of prompts, by layer, recorded while the prompts are
// computed here. A prefill node sends them as hints, and a working set is warmed with them (ESS,
// arXiv 2512.10576, section 3.2). Only the engine's thread calls it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/sparse_params.h"
#include "src/device/device.h"

namespace sluice {

class PromptSelections {
 public:
  static constexpr int kPositions = 32;  // The last positions of a prompt that are kept.

  struct Options {
    Device* device = nullptr;
    int layers = 0;
    int top_k = 0;
    int slots = 0;
    // Most slots whose prompts are watched at the same time. Each takes layers * kPositions * top_k
    // words of device memory: 15 MiB for DeepSeek-V3.2.
    int prompts = 1;
  };
  // RESOURCE_EXHAUSTED: there is no memory.
  static absl::StatusOr<std::unique_ptr<PromptSelections>> Create(const Options& options);

  // Watches the slot's prompt, which is computed from its next step on. Returns false if too many
  // prompts are watched; then nothing of this one is kept.
  bool Begin(int slot);
  // Stops watching the slot. REQUIRES: nothing reads its lists any more.
  void End(int slot);
  bool watched(int slot) const { return RingOf(slot) != nullptr; }

  // Must be called before a step is enqueued, like AttentionPolicy::BeginStep. REQUIRES: the step's
  // rows of watched slots are rows of their prompts.
  void BeginStep(absl::Span<const int32_t> slots, absl::Span<const int32_t> positions);
  // A SelectionObserver (index_selection.h). REQUIRES: a step that has rows of a watched slot is
  // not recorded.
  void Keep(Stream& stream, int layer, const kernels::UnitLists& selected, int32_t first_row,
            int32_t rows);

  // Positions [first, end) of the slot's prompt are kept, counting the steps enqueued so far. They
  // are the last ones, at most kPositions of them.
  struct Range {
    int64_t first = 0;
    int64_t end = 0;
  };
  Range KeptOf(int slot) const;
  // Returns a position's list in a layer, on the device, as one row.
  kernels::UnitLists ListOf(int slot, int layer, int64_t position) const;

  // A copy on the host of what is kept of a slot. Read waits for `stream`.
  struct Lists {
    Range positions;
    int32_t top_k = 0;
    std::vector<int32_t> units;   // [layers][positions][top_k], ascending
    std::vector<int32_t> counts;  // [layers][positions]
    absl::Span<const int32_t> Of(int layer, int64_t position) const;
  };
  Lists Read(Stream& stream, int slot);

 private:
  // A prompt that is watched. Position p is row p % kPositions of its lists in every layer.
  struct Ring {
    int slot = -1;  // -1: free
    Range kept;
    // Rows of the step under way; the first one has position `first_position`.
    int32_t first_row = 0, rows = 0;
    int64_t first_position = 0;
    Buffer memory;  // int32 [layers][kPositions][top_k], then [layers][kPositions]
  };
  explicit PromptSelections(const Options& options) : options_(options) {}
  const Ring* RingOf(int slot) const;
  int64_t ListAt(int layer, int64_t position) const {
    return int64_t{layer} * kPositions + position % kPositions;
  }
  int64_t AllUnits() const { return int64_t{options_.layers} * kPositions * options_.top_k; }

  const Options options_;
  std::vector<Ring> rings_;
  Buffer read_;  // A ring's memory, on the host.
};

}  // namespace sluice
