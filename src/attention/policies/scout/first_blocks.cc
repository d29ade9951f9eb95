#include "src/attention/policies/scout/first_blocks.h"

#include <algorithm>
#include <utility>

#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<FirstBlocks>> FirstBlocks::Create(const PolicyOptions& options,
                                                                 const ScoutShape& shape,
                                                                 const OffloadTier& tier) {
  SLUICE_ASSIGN_OR_RETURN(BlockSelection selection,
                          BlockSelection::Create(options, shape, /*rows=*/1, tier));
  std::unique_ptr<FirstBlocks> made(new FirstBlocks(shape, options.device, std::move(selection)));
  const auto allocate = [&](Buffer* buffer, MemoryKind kind, int64_t words) {
    auto allocated = options.device->Allocate(kind, static_cast<size_t>(words) * 4,
                                              "the last queries of prompts");
    if (allocated.ok()) *buffer = *std::move(allocated);
    return allocated.status();
  };
  const int64_t width = int64_t{shape.heads} * shape.head_dim;
  SLUICE_RETURN_IF_ERROR(
      allocate(&made->kept_, MemoryKind::kDevice, int64_t{shape.layers} * shape.slots * width));
  const int64_t resident = int64_t{shape.kv_heads} * shape.resident_blocks;
  SLUICE_RETURN_IF_ERROR(allocate(&made->resident_, MemoryKind::kDevice, resident));
  SLUICE_RETURN_IF_ERROR(allocate(&made->places_, MemoryKind::kDevice, resident));
  SLUICE_RETURN_IF_ERROR(allocate(&made->missing_, MemoryKind::kDevice,
                                  int64_t{shape.kv_heads} * shape.budget_blocks));
  SLUICE_RETURN_IF_ERROR(
      allocate(&made->counts_, MemoryKind::kDevice, int64_t{2} * shape.kv_heads));
  for (KeepList& list : made->lists_) {
    SLUICE_RETURN_IF_ERROR(allocate(&list.rows, MemoryKind::kPinned, shape.slots));
    SLUICE_RETURN_IF_ERROR(allocate(&list.slots, MemoryKind::kPinned, shape.slots));
    SLUICE_RETURN_IF_ERROR(allocate(&list.count, MemoryKind::kPinned, 1));
    list.done = options.device->NewEvent();
  }
  return made;
}

float* FirstBlocks::kept(int layer, int slot) const {
  return kept_.as<float>() +
         (int64_t{layer} * shape_.slots + slot) * shape_.heads * shape_.head_dim;
}

void FirstBlocks::Joined(int slot) { slots_[static_cast<size_t>(slot)] = {.in_prompt = true}; }

void FirstBlocks::BeginStep(absl::Span<const int32_t> slots, absl::Span<const int32_t> positions) {
  step_ = nullptr;
  const auto in_prompt = [this](int32_t slot) {
    return slots_[static_cast<size_t>(slot)].in_prompt;
  };
  if (std::none_of(slots.begin(), slots.end(), in_prompt)) return;
  step_ = &lists_[next_list_];
  next_list_ = (next_list_ + 1) % lists_.size();
  step_->done->Wait();  // it was, unless more steps are under way than there are lists
  int32_t count = 0;
  for (size_t r = 0; r < slots.size(); ++r) {
    Slot& slot = slots_[static_cast<size_t>(slots[r])];
    if (!slot.in_prompt) continue;
    // A sequence's rows are neighbours, in order.
    if (r + 1 < slots.size() && slots[r + 1] == slots[r]) continue;
    step_->rows.as<int32_t>()[count] = static_cast<int32_t>(r);
    step_->slots.as<int32_t>()[count] = slots[r];
    slot.newest = positions[r];
    ++count;
  }
  *step_->count.as<int32_t>() = count;
}

void FirstBlocks::Keep(Stream& stream, int layer, const kernels::AttentionParams& params) {
  if (step_ == nullptr) return;
  scale_ = params.scale;
  kernels::TransferParams keep{};
  keep.source = params.q;
  keep.target = kept(layer, 0);
  keep.unit_bytes = shape_.heads * shape_.head_dim * static_cast<int32_t>(sizeof(float));
  keep.source_pitch = params.q_stride * static_cast<int64_t>(sizeof(float));
  keep.target_pitch = keep.unit_bytes;
  keep.source_units = step_->rows.as<int32_t>();
  keep.target_units = step_->slots.as<int32_t>();
  keep.counts = step_->count.as<int32_t>();
  keep.lists = 1;
  keep.capacity = shape_.slots;
  device_->kernels().Transfer(stream, keep);
}

void FirstBlocks::EndStep(Stream& stream) {
  if (step_ != nullptr) stream.Record(*step_->done);
  step_ = nullptr;
}

void FirstBlocks::Bring(Stream& stream, int layer, int slot,
                        const OffloadTier::BulkRow& row) const {
  AttentionPolicy::Queries queries;
  queries.q = kept(layer, slot);
  queries.stride = int64_t{shape_.heads} * shape_.head_dim;
  queries.slots = row.slots;
  queries.positions = row.positions;
  queries.rows = 1;
  queries.heads = shape_.heads;
  queries.scale = scale_;
  auto* const counts = counts_.as<int32_t>();
  const BlockSelection::Split split{
      {resident_.as<int32_t>(), counts, shape_.resident_blocks},
      places_.as<int32_t>(),
      {missing_.as<int32_t>(), counts + shape_.kv_heads, shape_.budget_blocks}};
  selection_.Choose(stream, layer, queries, split);
  selection_.Bring(stream, layer, queries, split.missing, /*due=*/nullptr, /*counters=*/nullptr);
}

}  // namespace sluice
