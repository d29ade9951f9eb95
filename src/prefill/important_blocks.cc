#include "src/prefill/important_blocks.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {

ImportantBlocks::ImportantBlocks(Device* device, const CacheLayout& layout, int heads,
                                 int64_t max_context)
    : device_(device),
      layers_(layout.layers),
      kv_heads_(layout.kinds[0].heads),
      block_tokens_(layout.kinds[0].block_tokens),
      most_blocks_(layout.kinds[0].BlocksFor(max_context)),
      row_values_(heads * layout.kinds[0].part_bytes[0] / SizeOf(layout.kinds[0].element_type)) {}

absl::StatusOr<std::unique_ptr<ImportantBlocks>> ImportantBlocks::Create(Device* device,
                                                                         const CacheLayout& layout,
                                                                         int heads,
                                                                         int64_t max_context) {
  std::unique_ptr<ImportantBlocks> made(new ImportantBlocks(device, layout, heads, max_context));
  const int64_t lists = int64_t{made->layers_} * made->kv_heads_;
  const BufferAllocator allocator(device, "the important blocks of a prompt (--hints)");
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kDevice, made->kv_heads_ * made->most_blocks_, &made->scores_));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kDevice, lists * made->most_blocks_, &made->units_));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, lists, &made->counts_));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kPinned, lists * (made->most_blocks_ + 1), &made->read_));
  const int64_t queries = made->layers_ * made->row_values_;
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, queries, &made->queries_));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kPinned, queries, &made->read_queries_));
  return made;
}

void ImportantBlocks::Find(Stream& stream, int layer, const kernels::AttentionParams& params,
                           const kernels::PagedCache& cache, int32_t count) {
  SLUICE_CHECK(count > 0 && count <= most_blocks_);
  const int32_t last = params.rows - 1;
  kernels::ExactScoresParams exact{};
  exact.q = params.q + last * params.q_stride;
  exact.q_stride = params.q_stride;
  exact.slots = params.slots + last;
  exact.positions = params.positions + last;
  exact.cache = cache;
  exact.scores = scores_.as<float>();
  exact.score_stride = most_blocks_;
  exact.rows = 1;
  exact.heads = params.heads;
  exact.unit_tokens = block_tokens_;
  exact.scale = params.scale;
  exact.reduction = kernels::GroupReduction::kSoftmaxSum;
  device_->kernels().ExactScores(stream, exact);

  stream.Copy(queries_.as<float>() + layer * row_values_, exact.q,
              static_cast<size_t>(row_values_) * sizeof(float));

  const int64_t list = int64_t{layer} * kv_heads_;
  kernels::TopKParams top{};
  top.scores = exact.scores;
  top.score_stride = most_blocks_;
  top.slots = exact.slots;
  top.positions = exact.positions;
  top.selected = {units_.as<int32_t>() + list * count, counts_.as<int32_t>() + list, count};
  top.rows = 1;
  top.kv_heads = kv_heads_;
  top.unit_tokens = block_tokens_;
  top.k = count;
  top.margin = std::numeric_limits<float>::infinity();
  device_->kernels().TopK(stream, top);
}

SelectionHints ImportantBlocks::Read(Stream& stream, int32_t count, bool want_queries) const {
  const int64_t lists = int64_t{layers_} * kv_heads_;
  auto* const units = read_.as<int32_t>();
  int32_t* const counts = units + lists * count;
  const std::unique_ptr<Event> there = device_->NewEvent();
  stream.Copy(units, units_.data(), static_cast<size_t>(lists * count) * sizeof(int32_t));
  stream.Copy(counts, counts_.data(), static_cast<size_t>(lists) * sizeof(int32_t));
  if (want_queries) stream.Copy(read_queries_.data(), queries_.data(), queries_.bytes());
  stream.Record(*there);
  there->Wait();
  SelectionHints hints;
  hints.unit_tokens = static_cast<uint32_t>(block_tokens_);
  for (int64_t list = 0; list < lists; ++list) {
    SelectionHints::Entry& entry = hints.entries.emplace_back();
    entry.layer = static_cast<uint32_t>(list / kv_heads_);
    entry.kv_head = static_cast<uint32_t>(list % kv_heads_);
    const int32_t* const first = units + list * count;
    // A failed device may leave anything in its memory.
    entry.units.assign(first, first + std::clamp(counts[list], 0, count));
  }
  if (want_queries) {
    const auto* const first = read_queries_.as<float>();
    hints.queries.assign(first, first + layers_ * row_values_);
  }
  return hints;
}

}  // namespace sluice
