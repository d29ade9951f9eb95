#include "src/prefill/last_selections.h"

#include <algorithm>
#include <utility>

#include "src/base/status_macros.h"

namespace sluice {

LastSelections::LastSelections(Device* device, int layers, int32_t top_k)
    : device_(device),
      layers_(layers),
      top_k_(top_k),
      kept_(static_cast<size_t>(layers) * kLastSelections, false) {}

absl::StatusOr<std::unique_ptr<LastSelections>> LastSelections::Create(Device* device, int layers,
                                                                       int32_t top_k) {
  std::unique_ptr<LastSelections> made(new LastSelections(device, layers, top_k));
  const int64_t lists = int64_t{layers} * kLastSelections;
  const auto allocate = [&](Buffer* buffer, MemoryKind kind, int64_t words) {
    auto allocated = device->Allocate(kind, static_cast<size_t>(words) * sizeof(int32_t),
                                      "the selections of a prompt's last rows (--hints)");
    if (allocated.ok()) *buffer = *std::move(allocated);
    return allocated.status();
  };
  SLUICE_RETURN_IF_ERROR(allocate(&made->units_, MemoryKind::kDevice, lists * top_k));
  SLUICE_RETURN_IF_ERROR(allocate(&made->counts_, MemoryKind::kDevice, lists));
  SLUICE_RETURN_IF_ERROR(allocate(&made->read_, MemoryKind::kPinned, lists * (top_k + 1)));
  return made;
}

void LastSelections::Begin(int64_t tokens) {
  tokens_ = tokens;
  kept_.assign(kept_.size(), false);
  named_.assign(static_cast<size_t>(tokens), 0);
}

void LastSelections::Keep(Stream& stream, int layer, const kernels::UnitLists& selected,
                          int64_t first_position, int rows) {
  SLUICE_CHECK(selected.capacity <= top_k_, "lists of ", selected.capacity, " tokens, of ", top_k_);
  const int64_t first = std::max(first_position, tokens_ - this->rows());
  const int64_t end = std::min(first_position + rows, tokens_);
  if (first >= end) return;
  const int64_t from = first - first_position;
  const int64_t to = int64_t{layer} * kLastSelections + first - (tokens_ - this->rows());
  const int64_t count = end - first;
  constexpr size_t kWord = sizeof(int32_t);
  auto* const units = units_.as<int32_t>() + to * top_k_;
  const int32_t* const source = selected.units + from * selected.capacity;
  if (selected.capacity == top_k_) {
    stream.Copy(units, source, static_cast<size_t>(count * top_k_) * kWord);
  } else {
    for (int64_t row = 0; row < count; ++row) {
      stream.Copy(units + row * top_k_, source + row * selected.capacity,
                  static_cast<size_t>(selected.capacity) * kWord);
    }
  }
  stream.Copy(counts_.as<int32_t>() + to, selected.counts + from,
              static_cast<size_t>(count) * kWord);
  std::fill_n(kept_.begin() + to, count, true);
}

SelectionHints LastSelections::Read(Stream& stream, int64_t most_tokens) {
  const int64_t lists = int64_t{layers_} * kLastSelections;
  auto* const units = read_.as<int32_t>();
  int32_t* const counts = units + lists * top_k_;
  const std::unique_ptr<Event> there = device_->NewEvent();
  stream.Copy(units, units_.data(), static_cast<size_t>(lists * top_k_) * sizeof(int32_t));
  stream.Copy(counts, counts_.data(), static_cast<size_t>(lists) * sizeof(int32_t));
  stream.Record(*there);
  there->Wait();

  SelectionHints hints;
  hints.unit_tokens = 1;
  // What is left out where there is too much: the oldest.
  const int64_t most = std::min(most_tokens, static_cast<int64_t>(kMaxHintUnits) / layers_);
  static_assert(kLastSelections * 1024 <= kMaxHintEntries, "an entry a row, of 1,024 layers");
  for (int layer = 0; layer < layers_; ++layer) {
    int64_t left = most;
    for (int64_t row = rows() - 1; row >= 0 && left > 0; --row) {
      const int64_t list = int64_t{layer} * kLastSelections + row;
      if (!kept_[static_cast<size_t>(list)]) continue;
      SelectionHints::Entry entry;
      entry.layer = static_cast<uint32_t>(layer);
      entry.position = static_cast<uint32_t>(tokens_ - rows() + row);
      const int32_t* const first = units + list * top_k_;
      // What a failed device left is nobody's list.
      const int32_t count = std::clamp(counts[list], 0, top_k_);
      for (int32_t i = 0; i < count && left > 0; ++i) {
        if (first[i] < 0 || first[i] >= tokens_) continue;
        uint32_t& by = named_[static_cast<size_t>(first[i])];
        if (std::exchange(by, static_cast<uint32_t>(layer) + 1) ==
            static_cast<uint32_t>(layer) + 1) {
          continue;
        }
        entry.units.push_back(static_cast<uint32_t>(first[i]));
        --left;
      }
      if (!entry.units.empty()) hints.entries.push_back(std::move(entry));
    }
  }
  return hints;
}

}  // namespace sluice
