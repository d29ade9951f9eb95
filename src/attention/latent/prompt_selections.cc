#include "src/attention/latent/prompt_selections.h"

#include <algorithm>

#include "src/base/status_macros.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<PromptSelections>> PromptSelections::Create(const Options& options) {
  SLUICE_CHECK(options.layers > 0 && options.top_k > 0 && options.prompts > 0);
  std::unique_ptr<PromptSelections> made(new PromptSelections(options));
  const auto bytes = static_cast<size_t>((made->AllUnits() + int64_t{options.layers} * kPositions) *
                                         int64_t{sizeof(int32_t)});
  made->rings_.resize(static_cast<size_t>(options.prompts));
  for (Ring& ring : made->rings_) {
    SLUICE_ASSIGN_OR_RETURN(
        ring.memory, options.device->Allocate(MemoryKind::kDevice, bytes, "prompts' selections"));
  }
  SLUICE_ASSIGN_OR_RETURN(
      made->read_, options.device->Allocate(MemoryKind::kPinned, bytes, "prompts' selections"));
  return made;
}

const PromptSelections::Ring* PromptSelections::RingOf(int slot) const {
  const auto ring = std::find_if(rings_.begin(), rings_.end(),
                                 [slot](const Ring& one) { return one.slot == slot; });
  return ring == rings_.end() ? nullptr : &*ring;
}

bool PromptSelections::Begin(int slot) {
  SLUICE_CHECK(slot >= 0 && !watched(slot));
  Ring* const ring = const_cast<Ring*>(RingOf(-1));
  if (ring == nullptr) return false;
  ring->slot = slot;
  ring->kept = {};
  ring->rows = 0;
  return true;
}

void PromptSelections::End(int slot) {
  if (Ring* const ring = const_cast<Ring*>(RingOf(slot))) ring->slot = -1;
}

void PromptSelections::BeginStep(absl::Span<const int32_t> slots,
                                 absl::Span<const int32_t> positions) {
  for (Ring& ring : rings_) {
    ring.rows = 0;
    if (ring.slot < 0) continue;
    // A sequence's rows are neighbours, in order.
    const auto begin = std::find(slots.begin(), slots.end(), ring.slot);
    const auto end = std::find_if(begin, slots.end(), [&](int32_t s) { return s != ring.slot; });
    ring.rows = static_cast<int32_t>(end - begin);
    if (ring.rows == 0) continue;
    ring.first_row = static_cast<int32_t>(begin - slots.begin());
    ring.first_position = positions[static_cast<size_t>(ring.first_row)];
    // Only the last rows are kept: the others would be overwritten.
    const int32_t older = std::max(ring.rows - kPositions, 0);
    ring.first_row += older;
    ring.first_position += older;
    ring.rows -= older;
    // Rows that do not follow the kept positions replace them.
    if (ring.first_position != ring.kept.end) ring.kept = {ring.first_position, 0};
    ring.kept.end = ring.first_position + ring.rows;
    ring.kept.first = std::max(ring.kept.first, ring.kept.end - kPositions);
  }
}

void PromptSelections::Keep(Stream& stream, int layer, const kernels::UnitLists& selected,
                            int32_t first_row, int32_t rows) {
  for (const Ring& ring : rings_) {
    int32_t row = std::max(ring.first_row, first_row);
    const int32_t end = std::min(ring.first_row + ring.rows, first_row + rows);
    while (row < end) {  // Two passes where the ring wraps around.
      const int64_t position = ring.first_position + (row - ring.first_row);
      const int64_t list = ListAt(layer, position);
      const auto count =
          static_cast<int32_t>(std::min<int64_t>(end - row, kPositions - position % kPositions));
      auto* const units = ring.memory.as<int32_t>();
      const auto copy = [&](int32_t* to, const int32_t* from, int64_t width) {
        stream.Copy(to + list * width, from + row * width,
                    static_cast<size_t>(count * width) * sizeof(int32_t));
      };
      SLUICE_CHECK(selected.capacity == options_.top_k);
      copy(units, selected.units, options_.top_k);
      copy(units + AllUnits(), selected.counts, 1);
      row += count;
    }
  }
}

PromptSelections::Range PromptSelections::KeptOf(int slot) const {
  const Ring* const ring = RingOf(slot);
  return ring == nullptr ? Range{} : ring->kept;
}

kernels::UnitLists PromptSelections::ListOf(int slot, int layer, int64_t position) const {
  const Ring* const ring = RingOf(slot);
  SLUICE_CHECK(ring != nullptr && position >= ring->kept.first && position < ring->kept.end);
  auto* const units = ring->memory.as<int32_t>();
  const int64_t list = ListAt(layer, position);
  return {units + list * options_.top_k, units + AllUnits() + list, options_.top_k};
}

PromptSelections::Lists PromptSelections::Read(Stream& stream, int slot) {
  Lists out;
  out.top_k = options_.top_k;
  const Ring* const ring = RingOf(slot);
  if (ring == nullptr || ring->kept.first == ring->kept.end) return out;
  const std::unique_ptr<Event> there = options_.device->NewEvent();
  stream.Copy(read_.data(), ring->memory.data(), read_.bytes());
  stream.Record(*there);
  there->Wait();
  out.positions = ring->kept;
  const auto* const units = read_.as<int32_t>();
  for (int layer = 0; layer < options_.layers; ++layer) {
    for (int64_t position = ring->kept.first; position < ring->kept.end; ++position) {
      const int64_t list = ListAt(layer, position);
      out.units.insert(out.units.end(), units + list * options_.top_k,
                       units + (list + 1) * options_.top_k);
      out.counts.push_back(units[AllUnits() + list]);
    }
  }
  return out;
}

absl::Span<const int32_t> PromptSelections::Lists::Of(int layer, int64_t position) const {
  const auto list =
      static_cast<size_t>(layer * (positions.end - positions.first) + position - positions.first);
  return absl::MakeConstSpan(units).subspan(list * static_cast<size_t>(top_k),
                                            static_cast<size_t>(counts[list]));
}

}  // namespace sluice
