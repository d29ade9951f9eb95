// The policy of a prefill node: `full`, which also says when a layer's caches are written, and
// finds what hints name. Internal to src/prefill.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "src/attention/forwarding_policy.h"
#include "src/attention/latent/prompt_selections.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/engine/batch_state.h"
#include "src/kv/cache_layout.h"
#include "src/prefill/important_blocks.h"

namespace sluice {

// Finds the blocks or tokens that hints name, for one prompt at a time. The model's attention
// decides which of the two is set.
struct HintFinders {
  std::unique_ptr<ImportantBlocks> blocks;       // for keys and values
  std::unique_ptr<PromptSelections> selections;  // for an indexer
  bool any() const { return blocks != nullptr || selections != nullptr; }
};

// The policy `full`, which also marks in the stream when a layer's caches are written, so that they
// can leave before that layer's attention and FFN, and finds what hints name, if hints are wanted.
class MarkingPolicy : public ForwardingPolicy {
 public:
  MarkingPolicy(FullPolicy* full, const HintFinders* finders, Device* device,
                const CacheLayout& layout)
      : ForwardingPolicy(full),
        full_(full),
        finders_(finders),
        has_index_(layout.FindKind("index") >= 0) {
    for (auto& events : events_) {
      for (int layer = 0; layer < layout.layers; ++layer) events.push_back(device->NewEvent());
    }
    if (finders_->selections == nullptr) return;
    full_->ObserveSelections([this](Stream& stream, int layer, const kernels::UnitLists& selected,
                                    int32_t first_row, int32_t rows) {
      finders_->selections->Keep(stream, layer, selected, first_row, rows);
    });
  }

  // Makes the marks go to the events of `buffer` from now on.
  void SetBuffer(int buffer) { buffer_ = static_cast<size_t>(buffer); }
  // Sets how many blocks of each layer and KV head are found for the last row of everything
  // launched from now on. 0: none.
  void SetImportantBlocks(int32_t count) { important_blocks_ = count; }
  Event& appended(int buffer, int layer) {
    return *events_[static_cast<size_t>(buffer)][static_cast<size_t>(layer)];
  }

  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override {
    ForwardingPolicy::BeginStep(stream, slots, positions);
    if (finders_->selections != nullptr) finders_->selections->BeginStep(slots, positions);
  }
  void Append(Stream& stream, int layer, kernels::RopeAppendParams params) override {
    ForwardingPolicy::Append(stream, layer, params);
    Mark(stream, layer);
  }
  void AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params,
                    int32_t first_row) override {
    ForwardingPolicy::AppendLatent(stream, layer, params, first_row);
    if (!has_index_) Mark(stream, layer);
  }
  // Comes after AppendLatent, and is the layer's last cache.
  void AppendIndex(Stream& stream, int layer, kernels::IndexAppendParams params) override {
    ForwardingPolicy::AppendIndex(stream, layer, params);
    Mark(stream, layer);
  }
  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override {
    ForwardingPolicy::Attend(stream, layer, params);
    if (important_blocks_ > 0) {
      finders_->blocks->Find(stream, layer, params, full_->LayerCache(layer), important_blocks_);
    }
  }

 private:
  void Mark(Stream& stream, int layer) {
    stream.Record(appended(static_cast<int>(buffer_), layer));
  }

  FullPolicy* const full_;
  const HintFinders* const finders_;
  const bool has_index_;
  int32_t important_blocks_ = 0;
  std::array<std::vector<std::unique_ptr<Event>>, BatchState::kDepth> events_;
  size_t buffer_ = 0;
};

}  // namespace sluice
