#include "src/attention/policies/ess/prompt_rows.h"

#include "src/base/status_macros.h"
#include "src/device/allocation.h"

namespace sluice {

absl::StatusOr<PromptRows> PromptRows::Create(Device* device, int slots, int64_t max_rows) {
  PromptRows rows;
  rows.generate_.resize(static_cast<size_t>(slots));
  rows.prompts_.resize(static_cast<size_t>(slots));
  const BufferAllocator allocator(device, "ess's rows that append");
  for (Buffer& buffer : rows.buffers_) {
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, max_rows, &buffer));
  }
  return rows;
}

void PromptRows::Join(int slot, bool replays) {
  generate_[static_cast<size_t>(slot)] = false;
  prompts_[static_cast<size_t>(slot)] = {};
  prompts_[static_cast<size_t>(slot)].replays = replays;
}

void PromptRows::Begin(int slot, int64_t tokens, int64_t cached) {
  prompts_[static_cast<size_t>(slot)].tokens = tokens;
  prompts_[static_cast<size_t>(slot)].cached = cached;
}

int64_t PromptRows::End(int slot, int64_t tokens) {
  generate_[static_cast<size_t>(slot)] = true;
  const Prompt& prompt = prompts_[static_cast<size_t>(slot)];
  return prompt.tokens == tokens ? prompt.replayed : 0;
}

void PromptRows::BeginStep(absl::Span<const int32_t> slots, absl::Span<const int32_t> positions) {
  appending_ = AppendingSlots(slots, positions);
  replays_.clear();
  for (size_t r = 0; r < slots.size(); ++r) {
    if (slots[r] < 0 || generate_[static_cast<size_t>(slots[r])]) continue;
    Prompt& prompt = prompts_[static_cast<size_t>(slots[r])];
    if (!prompt.replays) continue;
    if (positions[r] < prompt.tokens - kReplayed || positions[r] >= prompt.tokens) continue;
    replays_.push_back({static_cast<int32_t>(r), positions[r] + 1 == prompt.tokens});
    ++prompt.replayed;
  }
}

// An entry that was handed over is better than one computed again from entries as they are stored,
// so rows that are computed again append nothing.
const int32_t* PromptRows::AppendingSlots(absl::Span<const int32_t> slots,
                                          absl::Span<const int32_t> positions) {
  const auto again = [&](size_t r) {
    if (slots[r] < 0) return false;
    const auto slot = static_cast<size_t>(slots[r]);
    return !generate_[slot] && positions[r] < prompts_[slot].cached;
  };
  size_t first = 0;
  while (first < slots.size() && !again(first)) ++first;
  if (first == slots.size()) return nullptr;
  const Buffer& rows = buffers_[next_];
  SLUICE_CHECK(slots.size() * sizeof(int32_t) <= rows.bytes(), "a step has as many rows");
  auto* const out = rows.as<int32_t>();
  next_ = 1 - next_;
  for (size_t r = 0; r < slots.size(); ++r) out[r] = again(r) ? -1 : slots[r];
  return out;
}

}  // namespace sluice
