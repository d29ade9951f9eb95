#include "src/attention/policies/fluxion/block_retrieval.h"

#include "kernels/fluxion_params.h"
#include "src/attention/policies/fluxion/block_digests.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<BlockRetrieval>> BlockRetrieval::Create(const PolicyOptions& options,
                                                                       const FluxionShape& shape,
                                                                       const OffloadTier* tier) {
  auto made = std::unique_ptr<BlockRetrieval>(new BlockRetrieval(options, shape, tier));
  const BufferAllocator allocator(options.device, "what a step of policy fluxion selects");
  const auto on_device = [&](int64_t words, Buffer* buffer) {
    return allocator.Words(MemoryKind::kDevice, words, buffer);
  };
  const int64_t values = int64_t{shape.rows} * shape.heads;
  SLUICE_RETURN_IF_ERROR(on_device(shape.lists(), &made->levels_));
  SLUICE_RETURN_IF_ERROR(on_device(shape.lists(), &made->volumes_));
  SLUICE_RETURN_IF_ERROR(on_device(values, &made->blocks_));
  if (options.fluxion.digests_in_dram) return made;
  SLUICE_RETURN_IF_ERROR(on_device(values * shape.score_stride(), &made->scores_));
  SLUICE_RETURN_IF_ERROR(on_device(shape.lists() * shape.most_units, &made->units_));
  SLUICE_RETURN_IF_ERROR(on_device(shape.lists(), &made->counts_));
  return made;
}

void BlockRetrieval::Plan(Stream& stream, const Queries& queries, const HeadBudgets& budgets) {
  kernels::PlanRetrievalParams plan{};
  plan.budgets = budgets.budgets();
  plan.streaming = budgets.streaming();
  plan.slots = queries.slots;
  plan.positions = queries.positions;
  plan.levels = levels_.as<int32_t>();
  plan.blocks = blocks_.as<int32_t>();
  plan.volumes = volumes_.as<int32_t>();
  plan.rows = queries.rows;
  plan.heads = queries.heads;
  plan.kv_heads = shape_.kv_heads;
  plan.first_level = shape_.plan_first;
  plan.last_level = shape_.plan_last;
  kernels_.PlanRetrieval(stream, plan);
}

kernels::UnitLists BlockRetrieval::Choose(Stream& stream, int layer, const Queries& queries,
                                          const HeadBudgets& budgets,
                                          kernels::SparseCounters* counters) {
  Plan(stream, queries, budgets);
  Score(stream, layer, queries);
  const kernels::UnitLists selected{units_.as<int32_t>(), counts_.as<int32_t>(), shape_.most_units};
  kernels::SelectUnionParams select{};
  select.scores = scores_.as<float>();
  select.score_stride = shape_.score_stride();
  select.slots = queries.slots;
  select.positions = queries.positions;
  select.levels = levels();
  select.blocks = blocks();
  select.selected = selected;
  select.counters = counters;
  select.rows = queries.rows;
  select.heads = queries.heads;
  select.kv_heads = shape_.kv_heads;
  select.unit_tokens = shape_.unit_tokens;
  kernels_.SelectUnion(stream, select);
  return selected;
}

void BlockRetrieval::Score(Stream& stream, int layer, const Queries& queries) {
  kernels::LevelScoresParams score{};
  score.q = queries.q;
  score.q_stride = queries.stride;
  score.slots = queries.slots;
  score.positions = queries.positions;
  score.digests = FluxionDigests(tier_, shape_, layer);
  score.levels = levels();
  score.blocks = blocks();
  score.scores = scores_.as<float>();
  score.score_stride = shape_.score_stride();
  score.rows = queries.rows;
  score.heads = queries.heads;
  score.head_dim = shape_.head_dim;
  kernels_.LevelScores(stream, score);
}

}  // namespace sluice
