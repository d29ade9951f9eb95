#include "src/server/decode_metrics.h"

#include <algorithm>
#include <cstddef>

namespace sluice {

double UpdatePoolMetrics(absl::Span<const PagePool* const> pools, Metrics& metrics) {
  const PagePool& pool = *pools.front();
  double fullest = 0;
  for (size_t kind = 0; kind < pool.layout().kinds.size(); ++kind) {
    const PagePool::Usage usage = PagePool::UsageOf(pools, kind);
    const TierGauges gauges = metrics.Tier(pool.name(), pool.layout().kinds[kind].name);
    gauges.capacity_bytes.Set(static_cast<double>(usage.capacity_bytes));
    gauges.reserved_bytes.Set(static_cast<double>(usage.reserved_bytes));
    gauges.used_bytes.Set(static_cast<double>(usage.used_bytes));
    const int64_t block_bytes = pool.layout().kinds[kind].block_bytes();
    gauges.capacity_blocks.Set(static_cast<double>(usage.capacity_bytes / block_bytes));
    gauges.reserved_blocks.Set(static_cast<double>(usage.reserved_bytes / block_bytes));
    gauges.used_blocks.Set(static_cast<double>(usage.used_bytes / block_bytes));
    fullest = std::max(
        fullest, static_cast<double>(usage.used_bytes) / static_cast<double>(usage.capacity_bytes));
  }
  return fullest;
}

void SetPolicyMetrics(const PolicyTotals& totals, Metrics& metrics) {
  metrics.SetWorkers(totals.workers);
  metrics.SetSchedules(totals.schedules);
  metrics.SetLink(totals.link);
  metrics.SetSelection(totals.selection);
}

void SetRankMetrics(int rank, const PolicyTotals& totals, Metrics& metrics) {
  RankTotals of_rank;
  of_rank.rows = totals.selection.rows;
  for (const SelectionTotals::Layer& layer : totals.selection.layers) {
    of_rank.missed += layer.missed;
  }
  of_rank.link_bytes = totals.selection.link_bytes;
  of_rank.worker_tokens = totals.workers.tokens;
  of_rank.worker_busy_seconds = totals.workers.busy_seconds;
  metrics.SetRank(rank, of_rank);
}

}  // namespace sluice
