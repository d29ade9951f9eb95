#include "src/attention/offload/prompt_queries.h"

#include <algorithm>

#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<PromptQueries>> PromptQueries::Create(const Options& options) {
  std::unique_ptr<PromptQueries> made(new PromptQueries(options));
  const BufferAllocator allocator(options.device, "the last queries of prompts");
  const int64_t width = int64_t{options.heads} * options.head_dim;
  SLUICE_RETURN_IF_ERROR(allocator.Words(
      MemoryKind::kDevice, int64_t{options.layers} * options.slots * width, &made->kept_));
  for (KeepList& list : made->lists_) {
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, options.slots, &list.rows));
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, options.slots, &list.slots));
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, 1, &list.count));
    list.done = options.device->NewEvent();
  }
  return made;
}

void PromptQueries::BeginStep(absl::Span<const int32_t> slots,
                              absl::Span<const int32_t> positions) {
  step_ = nullptr;
  const auto in_prompt = [this](int32_t slot) {
    return slot >= 0 && slots_[static_cast<size_t>(slot)].in_prompt;
  };
  if (std::none_of(slots.begin(), slots.end(), in_prompt)) return;
  step_ = &lists_[next_list_];
  next_list_ = (next_list_ + 1) % lists_.size();
  step_->done->Wait();  // ready already, unless more steps are under way than there are lists
  int32_t count = 0;
  for (size_t r = 0; r < slots.size(); ++r) {
    if (!in_prompt(slots[r])) continue;
    Slot& slot = slots_[static_cast<size_t>(slots[r])];
    // The rows of a sequence are adjacent and in order.
    if (r + 1 < slots.size() && slots[r + 1] == slots[r]) continue;
    step_->rows.as<int32_t>()[count] = static_cast<int32_t>(r);
    step_->slots.as<int32_t>()[count] = slots[r];
    slot.newest = positions[r];
    ++count;
  }
  *step_->count.as<int32_t>() = count;
}

void PromptQueries::Keep(Stream& stream, int layer, const kernels::AttentionParams& params) {
  if (step_ == nullptr) return;
  scale_ = params.scale;
  kernels::TransferParams keep{};
  keep.source = params.q;
  keep.target = Of(layer, 0);
  keep.unit_bytes = options_.heads * options_.head_dim * static_cast<int32_t>(sizeof(float));
  keep.source_pitch = params.q_stride * static_cast<int64_t>(sizeof(float));
  keep.target_pitch = keep.unit_bytes;
  keep.source_units = step_->rows.as<int32_t>();
  keep.target_units = step_->slots.as<int32_t>();
  keep.counts = step_->count.as<int32_t>();
  keep.lists = 1;
  keep.capacity = options_.slots;
  options_.device->kernels().Transfer(stream, keep);
}

void PromptQueries::EndStep(Stream& stream) {
  if (step_ != nullptr) stream.Record(*step_->done);
  step_ = nullptr;
}

}  // namespace sluice
