// The queries of each prompt's newest rows in every sparse layer. They tell which part of a cache
// matters when the sequence's first decode row comes. They are kept by slot.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/params.h"
#include "src/device/device.h"

namespace sluice {

// Only the engine's thread may call it.
class PromptQueries {
 public:
  struct Options {
    Device* device = nullptr;
    int layers = 0;
    int slots = 0;
    int heads = 0;
    int head_dim = 0;
    int rows = 1;                             // newest rows of a prompt that are kept
    MemoryKind memory = MemoryKind::kDevice;  // where they are kept
  };
  // RESOURCE_EXHAUSTED: there is no memory.
  static absl::StatusOr<std::unique_ptr<PromptQueries>> Create(const Options& options);

  // Takes note of a new sequence: all of its rows belong to its prompt until PromptEnded.
  void Joined(int slot) { slots_[static_cast<size_t>(slot)] = {.in_prompt = true}; }
  void PromptEnded(int slot) { slots_[static_cast<size_t>(slot)].in_prompt = false; }
  // Begins a step with these rows, in order.
  void BeginStep(absl::Span<const int32_t> slots, absl::Span<const int32_t> positions);
  // Enqueues, after a layer's queries were made, that those of each prompt's newest rows are kept.
  void Keep(Stream& stream, int layer, const kernels::AttentionParams& params);
  // Ends the step: there is no further layer.
  void EndStep(Stream& stream);

  // Returns whether the last of the slot's first `tokens` positions was computed on this node.
  bool Knows(int slot, int64_t tokens) const {
    return slots_[static_cast<size_t>(slot)].newest == tokens - 1;
  }
  // Returns how many rows are kept, the newest one included.
  int Rows(int slot) const { return slots_[static_cast<size_t>(slot)].rows; }
  // Returns the queries of the newest row, or of any kept one, [heads][head_dim]. The second may be
  // called on any thread.
  float* Of(int layer, int slot) const {
    return Of(layer, slot, slots_[static_cast<size_t>(slot)].newest);
  }
  float* Of(int layer, int slot, int64_t position) const {
    const int64_t row = int64_t{slot} * options_.rows + position % options_.rows;
    return kept_.as<float>() + (int64_t{layer} * options_.slots * options_.rows + row) *
                                   options_.heads * options_.head_dim;
  }
  float scale() const { return scale_; }

 private:
  struct Slot {
    bool in_prompt = false;
    int64_t newest = -1;  // the newest position whose queries are kept
    int rows = 0;         // how many are kept, up to that position
  };
  // A list of which row's queries go where in a step: row position % rows of a slot. Pinned.
  struct KeepList {
    Buffer rows, targets;  // int32 [slots][rows]
    Buffer count;          // int32
    std::unique_ptr<Event> done;
  };
  // Maximum steps under way at once.
  static constexpr size_t kSteps = 2;

  explicit PromptQueries(const Options& options)
      : options_(options), slots_(static_cast<size_t>(options.slots)) {}

  const Options options_;
  Buffer kept_;  // float [layers][slots][rows][heads][head_dim]
  float scale_ = 0;
  std::vector<Slot> slots_;
  std::array<KeepList, kSteps> lists_;
  size_t next_list_ = 0;
  KeepList* step_ = nullptr;  // null: the step has no row of a prompt
};

}  // namespace sluice
