#include "src/attention/policies/fluxion/anchor_blocks.h"

#include <utility>
#include <vector>

#include "kernels/fluxion_params.h"
#include "src/attention/policies/fluxion/block_digests.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<AnchorBlocks>> AnchorBlocks::Create(Device* device,
                                                                   const FluxionShape& shape,
                                                                   const OffloadTier* tier) {
  auto made = std::unique_ptr<AnchorBlocks>(new AnchorBlocks(device, shape, tier));
  if (made->blocks_of_head() == 0) return nullptr;
  SLUICE_RETURN_IF_ERROR(made->Allocate());
  return made;
}

absl::Status AnchorBlocks::Allocate() {
  const std::vector<int32_t> levels(static_cast<size_t>(shape_.kv_heads), shape_.first_level);
  const std::vector<int32_t> blocks(static_cast<size_t>(shape_.heads), blocks_of_head());
  SLUICE_ASSIGN_OR_RETURN(levels_, Uploaded(device_, levels, "what the anchor looks for"));
  SLUICE_ASSIGN_OR_RETURN(blocks_, Uploaded(device_, blocks, "what the anchor looks for"));

  const int64_t lists = shape_.kv_heads;
  const std::pair<Buffer*, int64_t> sizes[] = {{&scores_, shape_.heads * shape_.score_stride()},
                                               {&selected_, lists * shape_.most_units},
                                               {&missing_, lists * shape_.most_units},
                                               {&resident_, lists * shape_.most_units},
                                               {&places_, lists * shape_.most_units},
                                               {&sink_, lists * shape_.sink_units},
                                               {&sink_at_, lists * shape_.sink_units},
                                               {&local_, lists * shape_.ring_units},
                                               {&local_at_, lists * shape_.ring_units},
                                               {&counts_, 5 * lists}};
  const BufferAllocator allocator(device_, "what the anchor looks for");
  for (const auto& [buffer, words] : sizes) {
    SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, words, buffer));
  }
  SLUICE_ASSIGN_OR_RETURN(BlockRecall recall, BlockRecall::Create(tier_, 1, shape_.most_units));
  recall_ = std::make_unique<BlockRecall>(std::move(recall));
  return absl::OkStatus();
}

void AnchorBlocks::Fetch(Stream& stream, int layer, const float* q,
                         const OffloadTier::BulkRow& row) {
  KeepSink(stream, layer, row);
  kernels::SplitParams split{};
  split.residency = tier_.Residency(layer);
  split.slots = row.slots;
  split.positions = row.positions;
  split.selected = Choose(stream, layer, q, row);
  split.resident = Units(resident_, shape_.most_units, 1);
  split.places = places_.as<int32_t>();
  split.missing = Units(missing_, shape_.most_units, 2);
  split.rows = 1;
  split.kv_heads = shape_.kv_heads;
  split.unit_tokens = shape_.unit_tokens;
  device_->kernels().Split(stream, split);

  KvAttention::Queries queries{};
  queries.slots = row.slots;
  queries.positions = row.positions;
  queries.rows = 1;
  recall_->Fetch(stream, layer, queries, split.missing, /*due=*/nullptr, /*counters=*/nullptr);
}

// SegmentLists stamps the sink's places, so that the recall does not take them.
void AnchorBlocks::KeepSink(Stream& stream, int layer, const OffloadTier::BulkRow& row) {
  kernels::SegmentListsParams params{};
  params.residency = tier_.Residency(layer);
  params.slots = row.slots;
  params.positions = row.positions;
  params.sink = Units(sink_, shape_.sink_units, 3);
  params.local = Units(local_, shape_.ring_units, 4);
  params.sink_places = sink_at_.as<int32_t>();
  params.local_places = local_at_.as<int32_t>();
  params.rows = 1;
  params.kv_heads = shape_.kv_heads;
  params.unit_tokens = shape_.unit_tokens;
  device_->kernels().SegmentLists(stream, params);
}

kernels::UnitLists AnchorBlocks::Choose(Stream& stream, int layer, const float* q,
                                        const OffloadTier::BulkRow& row) {
  kernels::LevelScoresParams score{};
  score.q = q;
  score.q_stride = int64_t{shape_.heads} * shape_.head_dim;
  score.slots = row.slots;
  score.positions = row.positions;
  score.digests = FluxionDigests(tier_, shape_, layer);
  score.levels = levels_.as<int32_t>();
  score.blocks = blocks_.as<int32_t>();
  score.scores = scores_.as<float>();
  score.score_stride = shape_.score_stride();
  score.rows = 1;
  score.heads = shape_.heads;
  score.head_dim = shape_.head_dim;
  device_->kernels().LevelScores(stream, score);

  kernels::SelectUnionParams select{};
  select.scores = score.scores;
  select.score_stride = score.score_stride;
  select.slots = row.slots;
  select.positions = row.positions;
  select.levels = score.levels;
  select.blocks = score.blocks;
  select.selected = Units(selected_, shape_.most_units, 0);
  select.rows = 1;
  select.heads = shape_.heads;
  select.kv_heads = shape_.kv_heads;
  select.unit_tokens = shape_.unit_tokens;
  device_->kernels().SelectUnion(stream, select);
  return select.selected;
}

}  // namespace sluice
