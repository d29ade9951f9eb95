#include "src/attention/policies/ess/draft_rows.h"

#include <algorithm>

#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {

DraftRows::DraftRows(const Options& options)
    : options_(options), slots_(static_cast<size_t>(options.slots)) {}

absl::StatusOr<std::unique_ptr<DraftRows>> DraftRows::Create(const Options& options) {
  std::unique_ptr<DraftRows> made(new DraftRows(options));
  const BufferAllocator allocator(options.device, "journals of drafts");
  const int64_t lists = options.tier->layout().layers * made->layer_lists();
  for (Buffer* words : {&made->places_, &made->units_, &made->stamps_}) {
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, lists * made->capacity(), words));
  }
  for (Buffer* words : {&made->counts_, &made->moves_}) {
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, lists, words));
  }
  const int64_t undone = 2 * int64_t{options.slots};
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, undone, &made->undone_));
  for (Staging& staging : made->stagings_) {
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, undone, &staging.words));
    staging.done = options.device->NewEvent();
  }
  return made;
}

DraftRows::~DraftRows() {
  for (const Staging& staging : stagings_) {
    if (staging.done != nullptr) staging.done->Wait();
  }
}

void DraftRows::Join(int slot, bool undoes) { slots_[static_cast<size_t>(slot)] = {undoes, 0}; }

kernels::ResidencyJournal DraftRows::Journal(int layer) const {
  const int64_t list = layer * layer_lists();
  const int64_t at = list * capacity();
  return {places_.as<int32_t>() + at,
          units_.as<int32_t>() + at,
          stamps_.as<int32_t>() + at,
          counts_.as<int32_t>() + list,
          options_.rows,
          static_cast<int32_t>(capacity())};
}

void DraftRows::BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                          absl::Span<const int32_t> positions, const std::vector<bool>& generates) {
  Staging& staging = stagings_[next_];
  auto* const last = staging.words.as<int32_t>();
  auto* const rows = last + options_.slots;
  bool undoes = false;
  for (size_t r = 0, end = 0; r < slots.size(); r = end) {
    end = r + 1;
    while (end < slots.size() && slots[end] == slots[r]) ++end;
    if (slots[r] < 0 || !generates[static_cast<size_t>(slots[r])]) continue;
    Slot& slot = slots_[static_cast<size_t>(slots[r])];
    SLUICE_CHECK(static_cast<int>(end - r) <= options_.rows, "a step has no more rows of it");
    const int32_t before = slot.end;
    slot.end = positions[end - 1] + 1;
    if (!slot.undoes || before <= positions[r]) continue;
    SLUICE_CHECK(before - positions[r] < options_.rows, "a step's first row counts");
    if (!undoes) {
      staging.done
          ->Wait();  // It is ready, unless more steps are under way than there are stagings.
      std::fill_n(last, 2 * options_.slots, 0);
      undoes = true;
    }
    last[slots[r]] = before - 1;
    rows[slots[r]] = before - positions[r];
  }
  if (undoes) TakeBack(stream, staging);
}

void DraftRows::TakeBack(Stream& stream, const Staging& staging) {
  next_ = (next_ + 1) % stagings_.size();
  stream.Copy(undone_.data(), staging.words.data(), staging.words.bytes());
  stream.Record(*staging.done);
  const EssTier& tier = *options_.tier;
  KernelSet& kernels = options_.device->kernels();
  const int layers = tier.layout().layers;
  for (int layer = 0; layer < layers; ++layer) {
    kernels::TakeBackResidencyParams undo{};
    undo.residency = tier.Residency(layer);
    undo.last = undone_.as<int32_t>();
    undo.rows = undo.last + options_.slots;
    undo.journal = Journal(layer);
    undo.home = tier.Home(layer);
    undo.pool = tier.Pool(layer);
    undo.move_counts = moves_.as<int32_t>() + layer * layer_lists();
    undo.slots = options_.slots;
    kernels.TakeBackResidency(stream, undo);
  }
  // Entries that refuted rows have put others in the place of come back from the home, those of all
  // layers together.
  kernels::TransferParams move{};
  move.source = tier.Home(0).base;
  move.target = tier.Pool(0).base;
  move.source_pitch = move.target_pitch = tier.latent().bytes_per_token;
  move.source_units = units_.as<int32_t>();
  move.target_units = places_.as<int32_t>();
  move.counts = moves_.as<int32_t>();
  move.lists = static_cast<int32_t>(layers * layer_lists());
  move.capacity = static_cast<int32_t>(capacity());
  move.unit_bytes = static_cast<int32_t>(tier.latent().bytes_per_token);
  kernels.Transfer(stream, move);
}

}  // namespace sluice
