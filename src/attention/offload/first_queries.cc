#include "src/attention/offload/first_queries.h"

#include <algorithm>
#include <cmath>

#include "src/base/status_macros.h"
#include "src/device/allocation.h"

namespace sluice {

FirstQueries::FirstQueries(const PolicyOptions& options)
    : layers_(options.hbm->layout().layers),
      heads_(options.heads),
      kv_heads_(options.hbm->layout().kinds[0].heads),
      head_dim_(options.hbm->layout().kinds[0].part_bytes[0] /
                SizeOf(options.hbm->layout().kinds[0].element_type)),
      from_(static_cast<size_t>(options.slots), From::kNone) {}

absl::StatusOr<std::unique_ptr<FirstQueries>> FirstQueries::Create(const PolicyOptions& options) {
  auto made = std::unique_ptr<FirstQueries>(new FirstQueries(options));
  SLUICE_ASSIGN_OR_RETURN(
      made->prompts_,
      PromptQueries::Create({options.device, static_cast<int>(made->layers_), options.slots,
                             options.heads, static_cast<int>(made->head_dim_)}));
  const BufferAllocator allocator(options.device, "the queries of prompts");
  SLUICE_RETURN_IF_ERROR(allocator.Words(
      MemoryKind::kPinned, options.slots * made->layers_ * made->layer_values(), &made->hinted_));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kPinned, options.slots * made->kv_heads_, &made->positions_));
  return made;
}

void FirstQueries::EndPrompt(int slot, int64_t tokens, const SelectionHints& hints) {
  From& from = from_[static_cast<size_t>(slot)];
  from = From::kNone;
  const int64_t values = layers_ * layer_values();
  if (prompts_->Knows(slot, tokens)) {
    from = From::kPrompt;
  } else if (std::ssize(hints.queries) == values &&
             std::ranges::all_of(hints.queries, [](float x) { return std::isfinite(x); })) {
    std::copy(hints.queries.begin(), hints.queries.end(), hinted_.as<float>() + slot * values);
    from = From::kHints;
  }
  prompts_->PromptEnded(slot);
  std::fill_n(positions_.as<int32_t>() + slot * kv_heads_, kv_heads_,
              from == From::kNone ? -1 : static_cast<int32_t>(tokens - 1));
}

void FirstQueries::Put(Stream& stream, int layer, int slot, int32_t* labelled) const {
  if (from_[static_cast<size_t>(slot)] == From::kHints) {
    stream.Copy(of(layer) + slot * layer_values(),
                hinted_.as<float>() + (slot * layers_ + layer) * layer_values(),
                static_cast<size_t>(layer_values()) * sizeof(float));
  }
  if (labelled == nullptr) return;
  stream.Copy(labelled, positions_.as<int32_t>() + slot * kv_heads_,
              static_cast<size_t>(kv_heads_) * sizeof(int32_t));
}

}  // namespace sluice
