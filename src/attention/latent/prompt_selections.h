// What the last positions of prompts selected, layer by layer, while they are computed here: what a
// prefill node sends as hints and a working set is warmed with (ESS, arXiv 2512.10576,
// section 3.2). Engine's thread.
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
  static constexpr int kPositions = 32;  // of a prompt that are kept, the last ones

  struct Options {
    Device* device = nullptr;
    int layers = 0;
    int top_k = 0;
    int slots = 0;
    // Slots whose prompts are watched at the same time; each takes layers * kPositions * top_k
    // words of device memory, 15 MiB of DeepSeek-V3.2.
    int prompts = 1;
  };
  // RESOURCE_EXHAUSTED: no memory.
  static absl::StatusOr<std::unique_ptr<PromptSelections>> Create(const Options& options);

  // The slot's prompt is to be computed from its next step on. False: too many are; nothing is kept
  // of it.
  bool Begin(int slot);
  // Nothing more is kept or read of the slot. REQUIRES: nothing reads its lists any more.
  void End(int slot);
  bool watched(int slot) const { return RingOf(slot) != nullptr; }

  // Of a step that is about to be enqueued, as AttentionPolicy::BeginStep. Its rows of watched
  // slots are rows of their prompts.
  void BeginStep(absl::Span<const int32_t> slots, absl::Span<const int32_t> positions);
  // A SelectionObserver (index_selection.h). REQUIRES: the step is not recorded where it has rows
  // of a watched slot.
  void Keep(Stream& stream, int layer, const kernels::UnitLists& selected, int32_t first_row,
            int32_t rows);

  // Positions [first, end) of the slot's prompt are kept, of the steps enqueued so far: at most
  // kPositions, the last ones.
  struct Range {
    int64_t first = 0;
    int64_t end = 0;
  };
  Range KeptOf(int slot) const;
  // A position's list in a layer, one row, on the device.
  kernels::UnitLists ListOf(int slot, int layer, int64_t position) const;

  // On the host: what is kept of a slot. Waits for `stream`.
  struct Lists {
    Range positions;
    int32_t top_k = 0;
    std::vector<int32_t> units;   // [layers][positions][top_k], ascending
    std::vector<int32_t> counts;  // [layers][positions]
    absl::Span<const int32_t> Of(int layer, int64_t position) const;
  };
  Lists Read(Stream& stream, int slot);

 private:
  // A prompt that is watched: position p is row p % kPositions of its lists in every layer.
  struct Ring {
    int slot = -1;  // -1: free
    Range kept;
    // Rows of the step under way, of positions from `first_position` on.
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
  Buffer read_;  // a ring's memory, on the host
};

}  // namespace sluice
