#include "src/attention/policies/fluxion/growing_anchors.h"

#include <algorithm>
#include <utility>

#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"

namespace sluice {

namespace {

int64_t CpuTokensAt(int64_t tokens) {
  return kernels::CpuTokens(kernels::SegmentsOf(static_cast<int32_t>(tokens - 1)));
}

}  // namespace

bool IsNextAnchor(int64_t anchor_tokens, int64_t tokens) {
  return anchor_tokens == 0 ? CpuTokensAt(tokens) >= kFirstAnchorCpuTokens
                            : tokens >= GrownByHalf(anchor_tokens);
}

int64_t AnchorDelay(int64_t anchor_tokens, int64_t tokens) {
  return anchor_tokens == 0 ? kLeastAnchorDelay : std::max(kLeastAnchorDelay, tokens / 8);
}

absl::StatusOr<std::unique_ptr<GrowingAnchors>> GrowingAnchors::Create(const Options& options) {
  SLUICE_ASSIGN_OR_RETURN(AnchorTable next, AnchorTable::Create(options.device, options.shape));
  SLUICE_ASSIGN_OR_RETURN(AnchorMeter meter,
                          AnchorMeter::Create(options.device, options.shape, options.tier,
                                              options.max_context, options.tau));
  auto made = std::unique_ptr<GrowingAnchors>(
      new GrowingAnchors(options, std::move(next), std::move(meter)));
  SLUICE_RETURN_IF_ERROR(made->Allocate());
  return made;
}

absl::Status GrowingAnchors::Allocate() {
  Device* const device = options_.device;
  const BufferAllocator allocator(device, "fluxion's new anchors");
  for (KeepList& list : lists_) {
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, list_words(), &list.words));
    list.sent = device->NewEvent();
  }
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, list_words(), &list_));
  SLUICE_RETURN_IF_ERROR(allocator.MirroredWords(int64_t{2} * options_.shape.slots, &anchors_));
  slots_.resize(static_cast<size_t>(options_.shape.slots));
  for (int slot = 0; slot < options_.shape.slots; ++slot) {
    Slot& s = slots_[static_cast<size_t>(slot)];
    s.kept = device->NewEvent();
    s.measured = device->NewEvent();
    s.copies = options_.counting->CopiesFrom(next_, slot);
  }
  // A step adds at most one row of each slot.
  kept_rows_.reserve(slots_.size());
  kept_slots_.reserve(slots_.size());
  paced_ = device->NewEvent();
  stream_ = device->NewStream(Device::StreamKind::kCompute);
  return absl::OkStatus();
}

void GrowingAnchors::EndPrompt(int slot, int64_t tokens, bool has_anchor) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  s.answers = true;
  s.stage = Stage::kNone;
  s.anchor_tokens = has_anchor && CpuTokensAt(tokens) > 0 ? tokens : 0;
}

void GrowingAnchors::Left(int slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  // A layer that was enqueued earlier is done if a later one of another slot was.
  if (paced_slot_ == slot) paced_->Wait();
  s.measured->Wait();
  s.answers = false;
  s.stage = Stage::kNone;
}

void GrowingAnchors::BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                               absl::Span<const int32_t> positions) {
  BeginMeasuring(stream);
  MeasureOneLayer();
  kept_rows_.clear();
  kept_slots_.clear();
  for (size_t row = 0; row < slots.size(); ++row) {
    if (slots[row] < 0) continue;
    Slot& s = slots_[static_cast<size_t>(slots[row])];
    if (!s.answers) continue;
    const int64_t position = positions[row];
    s.newest = position;
    if (s.stage == Stage::kMeasuring && position >= s.counts_at) Count(stream, slots[row]);
    if (s.stage != Stage::kNone || !IsNextAnchor(s.anchor_tokens, position + 1)) continue;
    s.stage = Stage::kKept;
    s.next_tokens = position + 1;
    s.counts_at = position + AnchorDelay(s.anchor_tokens, s.next_tokens);
    kept_rows_.push_back(static_cast<int32_t>(row));
    kept_slots_.push_back(slots[row]);
  }
  if (keeps_ || !kept_rows_.empty()) SendList(stream, kept_rows_, kept_slots_);
  keeps_ = !kept_rows_.empty();
}

// The step before kept the queries, and wrote the row's keys and values to the host cache. Its end
// is here on the stream.
void GrowingAnchors::BeginMeasuring(Stream& stream) {
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    Slot& s = slots_[slot];
    if (s.stage != Stage::kKept) continue;
    s.stage = Stage::kMeasuring;
    s.layer = options_.shape.dense_layers;
    s.kept->Wait();  // ready, since the slot's last anchor counts by now or is forgotten
    stream.Record(*s.kept);
  }
}

// One layer in a step, and none while the one before is under way, so that a step is not delayed
// much. The sequence goes first whose anchor counts soonest.
void GrowingAnchors::MeasureOneLayer() {
  int chosen = -1;
  int64_t least = 0;
  for (int slot = 0; slot < options_.shape.slots; ++slot) {
    const Slot& s = slots_[static_cast<size_t>(slot)];
    if (s.stage != Stage::kMeasuring || s.layer == options_.shape.layers) continue;
    const int64_t left = s.counts_at - s.newest;
    if (chosen >= 0 && left >= least) continue;
    chosen = slot;
    least = left;
  }
  if (chosen < 0 || !paced_->Ready()) return;
  Measure(chosen);
  stream_->Record(*paced_);
  paced_slot_ = chosen;
}

// Enqueues the next layer of the slot.
void GrowingAnchors::Measure(int slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  int32_t* const on_device = anchors_.device.as<int32_t>() + 2 * slot;
  if (s.layer == options_.shape.dense_layers) {
    int32_t* const anchor = anchors_.host.as<int32_t>() + 2 * slot;
    anchor[0] = slot;
    anchor[1] = static_cast<int32_t>(s.next_tokens - 1);
    stream_->WaitFor(*s.kept);
    stream_->Copy(on_device, anchor, 2 * sizeof(int32_t));
  }
  meter_.Measure(*stream_, s.layer, options_.queries->OfSlot(s.layer, slot), on_device,
                 on_device + 1, next_);
  if (++s.layer < options_.shape.layers) return;
  s.measured->Wait();  // ready, as `kept` is in BeginMeasuring
  stream_->Record(*s.measured);
}

void GrowingAnchors::Count(Stream& stream, int slot) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  while (s.layer < options_.shape.layers) Measure(slot);
  stream.WaitFor(*s.measured);
  stream.CopyBatch(s.copies.data(), s.copies.size());
  s.anchor_tokens = s.next_tokens;
  s.stage = Stage::kNone;
}

void GrowingAnchors::SendList(Stream& stream, absl::Span<const int32_t> rows,
                              absl::Span<const int32_t> slots) {
  KeepList& list = lists_[next_list_];
  next_list_ = (next_list_ + 1) % kSteps;
  list.sent->Wait();  // ready already, unless more steps are under way than there are lists
  auto* const words = list.words.as<int32_t>();
  words[0] = static_cast<int32_t>(rows.size());
  std::copy(rows.begin(), rows.end(), words + 1);
  std::copy(slots.begin(), slots.end(), words + 1 + options_.shape.slots);
  stream.Copy(list_.data(), words, static_cast<size_t>(list_words()) * sizeof(int32_t));
  stream.Record(*list.sent);
}

void GrowingAnchors::Keep(Stream& stream, int layer, const KvAttention::Queries& queries) const {
  const FluxionShape& shape = options_.shape;
  kernels::TransferParams keep{};
  keep.source = queries.q;
  keep.target = options_.queries->of(layer);
  keep.unit_bytes = shape.heads * shape.head_dim * static_cast<int32_t>(sizeof(float));
  keep.source_pitch = queries.stride * static_cast<int64_t>(sizeof(float));
  keep.target_pitch = keep.unit_bytes;
  keep.counts = list_.as<int32_t>();
  keep.source_units = keep.counts + 1;
  keep.target_units = keep.source_units + shape.slots;
  keep.lists = 1;
  keep.capacity = shape.slots;
  options_.device->kernels().Transfer(stream, keep);
}

}  // namespace sluice
