#include "src/attention/policies/scout/block_selection.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {

absl::StatusOr<BlockSelection> BlockSelection::Create(const PolicyOptions& options,
                                                      const ScoutShape& shape, int rows,
                                                      const OffloadTier& tier) {
  SLUICE_ASSIGN_OR_RETURN(BlockRecall recall, BlockRecall::Create(tier, rows, shape.budget_blocks));
  BlockSelection made(options, shape, tier, std::move(recall));
  const int64_t lists = int64_t{rows} * shape.kv_heads;
  const std::pair<Buffer*, int64_t> sizes[] = {{&made.scores_, lists * shape.most_blocks},
                                               {&made.shortlist_, lists * shape.shortlist_blocks},
                                               {&made.shortlist_counts_, lists},
                                               {&made.selected_, lists * shape.budget_blocks},
                                               {&made.selected_counts_, lists}};
  const BufferAllocator allocator(options.device, "the selection of blocks");
  for (const auto& [buffer, words] : sizes) {
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, words, buffer));
  }
  return made;
}

kernels::UnitLists BlockSelection::Choose(Stream& stream, int layer,
                                          const KvAttention::Queries& queries,
                                          const Split& to) const {
  KernelSet& kernels = device_->kernels();
  kernels::DigestScoresParams scores{};
  scores.q = queries.q;
  scores.q_stride = queries.stride;
  scores.slots = queries.slots;
  scores.positions = queries.positions;
  scores.digests = tier_->Array(layer, kScoutDigests);
  scores.scores = scores_.as<float>();
  scores.score_stride = shape_.most_blocks;
  scores.rows = queries.rows;
  scores.heads = queries.heads;
  scores.block_tokens = shape_.block_tokens;
  scores.scale = queries.scale;
  scores.reduction = reduction_;
  if (shape_.shortlist_blocks > 0) scores.narrowed = narrowed_;
  kernels.DigestScores(stream, scores);

  if (shape_.shortlist_blocks > 0) Refine(stream, layer, queries);
  const kernels::UnitLists selected = {selected_.as<int32_t>(), selected_counts_.as<int32_t>(),
                                       shape_.budget_blocks};
  SelectBest(stream, queries, shape_.budget_blocks, 0, selected);

  kernels::SplitParams split{};
  split.residency = tier_->Residency(layer);
  split.slots = queries.slots;
  split.positions = queries.positions;
  split.selected = selected;
  split.resident = to.resident;
  split.places = to.places;
  split.missing = to.missing;
  split.rows = queries.rows;
  split.kv_heads = shape_.kv_heads;
  split.unit_tokens = shape_.block_tokens;
  split.whole = whole_;
  kernels.Split(stream, split);
  return selected;
}

void BlockSelection::SelectBest(Stream& stream, const KvAttention::Queries& queries, int32_t k,
                                int32_t short_k, const kernels::UnitLists& selected) const {
  kernels::TopKParams top{};
  top.scores = scores_.as<float>();
  top.score_stride = shape_.most_blocks;
  top.slots = queries.slots;
  top.positions = queries.positions;
  top.selected = selected;
  top.rows = queries.rows;
  top.kv_heads = shape_.kv_heads;
  top.unit_tokens = shape_.block_tokens;
  top.k = k;
  top.short_k = short_k;
  top.first_units = kScoutFirstBlocks;
  top.last_units = std::min(kScoutRingBlocks, k - kScoutFirstBlocks);
  top.margin = std::numeric_limits<float>::infinity();
  device_->kernels().TopK(stream, top);
}

void BlockSelection::Refine(Stream& stream, int layer, const KvAttention::Queries& queries) const {
  kernels::RefineScoresParams refine{};
  refine.q = queries.q;
  refine.q_stride = queries.stride;
  refine.slots = queries.slots;
  refine.positions = queries.positions;
  refine.digests = tier_->Array(layer, kScoutDigests);
  refine.codes = tier_->Array(layer, kScoutKeyCodes);
  refine.units = {shortlist_.as<int32_t>(), shortlist_counts_.as<int32_t>(),
                  shape_.shortlist_blocks};
  refine.scores = scores_.as<float>();
  refine.score_stride = shape_.most_blocks;
  refine.rows = queries.rows;
  refine.heads = queries.heads;
  refine.block_tokens = shape_.block_tokens;
  refine.scale = queries.scale;
  refine.reduction = reduction_;
  SelectBest(stream, queries, shape_.least_shortlist, shape_.shortlist_blocks, refine.units);
  device_->kernels().RefineScores(stream, refine);
}

}  // namespace sluice
