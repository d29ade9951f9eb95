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
  const int64_t rows = int64_t{options.slots} * options.rows;
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(options.memory, options.layers * rows * width, &made->kept_));
  for (KeepList& list : made->lists_) {
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, rows, &list.rows));
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, rows, &list.targets));
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
  // The rows of a sequence are adjacent and in order.
  for (size_t r = 0, end = 0; r < slots.size(); r = end) {
    while (end < slots.size() && slots[end] == slots[r]) ++end;
    if (!in_prompt(slots[r])) continue;
    Slot& slot = slots_[static_cast<size_t>(slots[r])];
    const auto added = static_cast<int64_t>(end - r);
    const bool goes_on = positions[r] == slot.newest + 1;
    slot.newest = positions[end - 1];
    slot.rows =
        static_cast<int>(std::min<int64_t>(added + (goes_on ? slot.rows : 0), options_.rows));
    for (size_t row = end - static_cast<size_t>(std::min<int64_t>(added, options_.rows)); row < end;
         ++row) {
      step_->rows.as<int32_t>()[count] = static_cast<int32_t>(row);
      step_->targets.as<int32_t>()[count] =
          slots[r] * options_.rows + positions[row] % options_.rows;
      ++count;
    }
  }
  *step_->count.as<int32_t>() = count;
}

void PromptQueries::Keep(Stream& stream, int layer, const kernels::AttentionParams& params) {
  if (step_ == nullptr) return;
  scale_ = params.scale;
  kernels::TransferParams keep{};
  keep.source = params.q;
  keep.target = Of(layer, 0, 0);
  keep.unit_bytes = options_.heads * options_.head_dim * static_cast<int32_t>(sizeof(float));
  keep.source_pitch = params.q_stride * static_cast<int64_t>(sizeof(float));
  keep.target_pitch = keep.unit_bytes;
  keep.source_units = step_->rows.as<int32_t>();
  keep.target_units = step_->targets.as<int32_t>();
  keep.counts = step_->count.as<int32_t>();
  keep.lists = 1;
  keep.capacity = options_.slots * options_.rows;
  options_.device->kernels().Transfer(stream, keep);
}

void PromptQueries::EndStep(Stream& stream) {
  if (step_ != nullptr) stream.Record(*step_->done);
  step_ = nullptr;
}

}  // namespace sluice
