// The blocks that a sequence begins with in HBM (section 3.4: "the important blocks identified
// after the prefill phase"): those that its prompt's last position finds important, where that
// position's row was computed here. Its queries are kept, and the selection is made at admission.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/attention/policies/scout/block_selection.h"

namespace sluice {

// Engine's thread.
class FirstBlocks {
 public:
  // `tier` outlives the result. RESOURCE_EXHAUSTED: no memory.
  static absl::StatusOr<std::unique_ptr<FirstBlocks>> Create(const PolicyOptions& options,
                                                             const ScoutShape& shape,
                                                             const OffloadTier& tier);

  // A new sequence: all of its rows are of its prompt until PromptEnded.
  void Joined(int slot);
  void PromptEnded(int slot) { slots_[static_cast<size_t>(slot)].in_prompt = false; }
  // A step begins; its rows, in their order.
  void BeginStep(absl::Span<const int32_t> slots, absl::Span<const int32_t> positions);
  // The step's attention in a sparse layer, after the queries were made: keeps those of each
  // prompt's newest row.
  void Keep(Stream& stream, int layer, const kernels::AttentionParams& params);
  // The step has no further layer.
  void EndStep(Stream& stream);

  // Whether the last of the slot's first `tokens` positions was computed here.
  bool Knows(int slot, int64_t tokens) const {
    return slots_[static_cast<size_t>(slot)].newest == tokens - 1;
  }
  // Brings the blocks that matter to that position into the layer's places. After the digests, on
  // the stream that warms. REQUIRES: Knows, and the row's position is that one.
  void Bring(Stream& stream, int layer, int slot, const OffloadTier::BulkRow& row) const;

 private:
  struct Slot {
    bool in_prompt = false;
    int64_t newest = -1;  // the position whose queries are kept
  };
  // Of a step: which row's queries go to which slot. Pinned.
  struct KeepList {
    Buffer rows, slots;  // int32 [slots]
    Buffer count;        // int32
    std::unique_ptr<Event> done;
  };
  // Steps under way at once.
  static constexpr size_t kSteps = 2;

  FirstBlocks(const ScoutShape& shape, Device* device, BlockSelection selection)
      : shape_(shape),
        device_(device),
        selection_(std::move(selection)),
        slots_(static_cast<size_t>(shape.slots)) {}
  float* kept(int layer, int slot) const;

  const ScoutShape shape_;
  Device* const device_;
  const BlockSelection selection_;  // of one row
  Buffer kept_;                     // float [layers][slots][heads][head_dim]
  // int32 lists of that row, which nobody reads but the operators here.
  Buffer resident_, places_, missing_, counts_;
  float scale_ = 0;
  std::vector<Slot> slots_;
  std::array<KeepList, kSteps> lists_;
  size_t next_list_ = 0;
  KeepList* step_ = nullptr;  // null: the step has no row of a prompt
};

}  // namespace sluice
