#include "src/server/decode_metrics.h"

#include <algorithm>
#include <cstddef>

#include "absl/time/time.h"

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

void UpdatePolicyMetrics(const AttentionPolicy& policy, const PagePool& hbm, Metrics& metrics) {
  const WorkerStatistics workers = policy.Workers();
  metrics.SetWorkers({static_cast<double>(workers.workers),
                      absl::ToDoubleSeconds(workers.busy),
                      static_cast<double>(workers.tokens),
                      {static_cast<double>(workers.failed), static_cast<double>(workers.left),
                       static_cast<double>(workers.late)}});
  const ScheduleStatistics schedules = policy.Schedules();
  ScheduleTotals totals;
  for (size_t i = 0; i < totals.layers.size(); ++i) totals.layers[i] = schedules.layers[i];
  totals.changes = static_cast<double>(schedules.changes);
  metrics.SetSchedules(totals);
  const LinkStatistics link = policy.Link();
  metrics.SetLink({link.mover, link.bytes_per_s});
  const PolicyStatistics recent = policy.Recent();
  SelectionTotals selection;
  for (const PolicyStatistics::Layer& layer : recent.layers) {
    selection.layers.push_back({static_cast<double>(layer.selected),
                                static_cast<double>(layer.missing),
                                static_cast<double>(layer.recalled)});
    selection.rows = std::max(selection.rows, static_cast<double>(layer.steps));
    selection.link_bytes += static_cast<double>(layer.link_bytes);
  }
  if (!recent.layers.empty()) {  // such a policy has nothing but KV slots in HBM's latent pages
    const CacheLayout& layout = hbm.layout();
    selection.places = static_cast<double>(hbm.UsageOf(0).used_bytes /
                                           layout.kinds[0].bytes_per_token / layout.layers);
  }
  metrics.SetSelection(selection);
}

}  // namespace sluice
