#include "src/attention/offload/block_recall.h"

#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

// A recall may take a whole step, so it leaves the processors to the model (TransferParams).
constexpr int32_t kRecallWorkers = 4;

}  // namespace

absl::StatusOr<BlockRecall> BlockRecall::Create(const OffloadTier& tier, int rows,
                                                int32_t capacity) {
  BlockRecall made(tier);
  const int64_t lists = int64_t{rows} * tier.options().hbm->layout().kinds[0].heads;
  const BufferAllocator allocator(tier.options().device, "the recall of blocks");
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, lists * capacity, &made.sources_));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, lists * capacity, &made.targets_));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, lists, &made.move_counts_));
  return made;
}

void BlockRecall::Fetch(Stream& stream, int layer, const KvAttention::Queries& queries,
                        const kernels::UnitLists& missing, const int32_t* due,
                        kernels::SparseCounters* counters) const {
  KernelSet& kernels = tier_->options().device->kernels();
  kernels::RecallParams recall{};
  recall.residency = tier_->Residency(layer);
  recall.slots = queries.slots;
  recall.positions = queries.positions;
  recall.missing = missing;
  recall.due = due;
  recall.home = tier_->Home(layer);
  recall.resident = tier_->Places(layer);
  recall.source_units = sources_.as<int32_t>();
  recall.target_units = targets_.as<int32_t>();
  recall.move_counts = move_counts_.as<int32_t>();
  recall.counters = counters;
  recall.rows = queries.rows;
  recall.kv_heads = recall.home.kv_heads;
  recall.unit_tokens = recall.home.block_tokens;
  kernels.Recall(stream, recall);

  const int64_t block_bytes = recall.home.page_bytes / recall.kv_heads;
  kernels::TransferParams move{};
  move.source = recall.home.base;
  move.target = recall.resident.base;
  move.source_pitch = move.target_pitch = block_bytes;
  move.unit_bytes = static_cast<int32_t>(block_bytes);
  move.source_units = recall.source_units;
  move.target_units = recall.target_units;
  move.counts = recall.move_counts;
  move.lists = queries.rows * recall.kv_heads;
  move.capacity = missing.capacity;
  move.max_workers = kRecallWorkers;
  kernels.Transfer(stream, move);
}

}  // namespace sluice
