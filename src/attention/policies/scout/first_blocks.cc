#include "src/attention/policies/scout/first_blocks.h"

#include <utility>

#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<FirstBlocks>> FirstBlocks::Create(const PolicyOptions& options,
                                                                 const ScoutShape& shape,
                                                                 const OffloadTier& tier) {
  SLUICE_ASSIGN_OR_RETURN(BlockSelection selection,
                          BlockSelection::Create(options, shape, /*rows=*/1, tier));
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<PromptQueries> queries,
                          PromptQueries::Create({options.device, shape.layers, shape.slots,
                                                 shape.heads, shape.head_dim}));
  std::unique_ptr<FirstBlocks> made(
      new FirstBlocks(shape, std::move(selection), std::move(queries)));
  const BufferAllocator allocator(options.device, "the first blocks of sequences");
  const int64_t resident = int64_t{shape.kv_heads} * shape.resident_blocks;
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, resident, &made->resident_));
  SLUICE_RETURN_IF_ERROR(allocator.Words(MemoryKind::kDevice, resident, &made->places_));
  SLUICE_RETURN_IF_ERROR(allocator.Words(
      MemoryKind::kDevice, int64_t{shape.kv_heads} * shape.budget_blocks, &made->missing_));
  SLUICE_RETURN_IF_ERROR(
      allocator.Words(MemoryKind::kDevice, int64_t{2} * shape.kv_heads, &made->counts_));
  return made;
}

void FirstBlocks::Fetch(Stream& stream, int layer, int slot,
                        const OffloadTier::BulkRow& row) const {
  KvAttention::Queries queries;
  queries.q = queries_->Of(layer, slot);
  queries.stride = int64_t{shape_.heads} * shape_.head_dim;
  queries.slots = row.slots;
  queries.positions = row.positions;
  queries.rows = 1;
  queries.heads = shape_.heads;
  queries.scale = queries_->scale();
  auto* const counts = counts_.as<int32_t>();
  const BlockSelection::Split split{
      {resident_.as<int32_t>(), counts, shape_.resident_blocks},
      places_.as<int32_t>(),
      {missing_.as<int32_t>(), counts + shape_.kv_heads, shape_.budget_blocks}};
  selection_.Choose(stream, layer, queries, split);
  selection_.Fetch(stream, layer, queries, split.missing, /*due=*/nullptr, /*counters=*/nullptr);
}

}  // namespace sluice
