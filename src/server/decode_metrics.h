// Brings the metrics of a decode node that are read on demand up to date.
#pragma once

#include "absl/types/span.h"
#include "src/attention/attention_policy.h"
#include "src/kv/page_pool.h"
#include "src/metrics/metrics.h"

namespace sluice {

// Sets the gauges of a tier, for each kind of cache, to the sums over its pools: one, or that of
// each rank. Returns the share of the fullest kind that is used, from 0 to 1: each kind runs out by
// itself.
double UpdatePoolMetrics(absl::Span<const PagePool* const> pools, Metrics& metrics);

// Sets what the policy counts about its workers, its schedules and its selections.
void UpdatePolicyMetrics(const AttentionPolicy& policy, const PagePool& hbm, Metrics& metrics);

}  // namespace sluice
