#include "src/attention/policies/scout/first_blocks.h"

#include <utility>

#include "src/base/status_macros.h"
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
  const auto allocate = [&](Buffer* buffer, MemoryKind kind, int64_t words) {
    auto allocated = options.device->Allocate(kind, static_cast<size_t>(words) * 4,
                                              "the first blocks of sequences");
    if (allocated.ok()) *buffer = *std::move(allocated);
    return allocated.status();
  };
  const int64_t resident = int64_t{shape.kv_heads} * shape.resident_blocks;
  SLUICE_RETURN_IF_ERROR(allocate(&made->resident_, MemoryKind::kDevice, resident));
  SLUICE_RETURN_IF_ERROR(allocate(&made->places_, MemoryKind::kDevice, resident));
  SLUICE_RETURN_IF_ERROR(allocate(&made->missing_, MemoryKind::kDevice,
                                  int64_t{shape.kv_heads} * shape.budget_blocks));
  SLUICE_RETURN_IF_ERROR(
      allocate(&made->counts_, MemoryKind::kDevice, int64_t{2} * shape.kv_heads));
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
