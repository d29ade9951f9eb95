// The plan of a retrieval on a CPU: lists are split over workers, and a plan is a few integers.
#include "kernels/cpu/cpu_tables.h"
#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

struct Plan {
  int32_t level = -1;
  int64_t volume = 0;
};

// Plans for the query heads of one list. REQUIRES: the cpu segment is not empty.
Plan PlanOf(const PlanRetrievalParams& p, const FluxionSegments& segments, int64_t first_head) {
  const int64_t group = p.heads / p.kv_heads;
  const float* const budgets = p.budgets + first_head * kFluxionLevels;
  const int32_t* const streaming = p.streaming + first_head;
  int64_t volumes[kFluxionLevels] = {};
  bool reads = false;
  for (int64_t g = 0; g < group; ++g) {
    if (streaming[g] != 0) continue;
    reads = true;
    for (int32_t level = p.first_level; level <= p.last_level; ++level) {
      volumes[level] += int64_t{LevelTokens(level)} *
                        BlocksOfShare(segments, level, budgets[g * kFluxionLevels + level]);
    }
  }
  Plan plan;
  for (int32_t level = p.first_level; reads && level <= p.last_level; ++level) {
    const int64_t volume = volumes[level] + CpuBlocks(segments, level);
    if (plan.level < 0 || volume < plan.volume) plan = {level, volume};
  }
  return plan;
}

}  // namespace

void PlanRetrieval(const PlanRetrievalParams& p, Worker worker) {
  if (p.kv_heads < 1 || p.heads % p.kv_heads != 0 || p.first_level < 0 ||
      p.first_level > p.last_level || p.last_level >= kFluxionLevels) {
    KernelCheckFailed("plan_retrieval: heads a multiple of kv_heads, levels from 0 to 3");
  }
  const int64_t group = p.heads / p.kv_heads;
  const Range mine = Share(int64_t{p.rows} * p.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t row = list / p.kv_heads, first_head = list * group;
    Plan plan;
    FluxionSegments segments;
    if (p.slots[row] >= 0) {
      segments = SegmentsOf(p.positions[row]);
      if (CpuTokens(segments) > 0) plan = PlanOf(p, segments, first_head);
    }
    p.levels[list] = plan.level;
    p.volumes[list] = static_cast<int32_t>(plan.volume);
    for (int64_t head = first_head; head < first_head + group; ++head) {
      const bool selects = plan.level >= 0 && p.streaming[head] == 0;
      p.blocks[head] = selects ? BlocksOfShare(segments, plan.level,
                                               p.budgets[head * kFluxionLevels + plan.level])
                               : 0;
    }
  }
}

}  // namespace sluice::kernels::cpu
