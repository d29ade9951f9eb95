// Brings the metrics of a decode node that are read on demand up to date.
#pragma once

#include "absl/types/span.h"
#include "src/kv/page_pool.h"
#include "src/metrics/metrics.h"
#include "src/server/policy_totals.h"

namespace sluice {

// Sets the gauges of a tier, for each kind of cache, to the sums over its pools: one, or that of
// each rank. Returns the share of the fullest kind that is used, from 0 to 1: each kind runs out by
// itself.
double UpdatePoolMetrics(absl::Span<const PagePool* const> pools, Metrics& metrics);

// Sets what a policy counts about its workers, its schedules and its selections, on a rank or on
// all of a node's.
void SetPolicyMetrics(const PolicyTotals& totals, Metrics& metrics);
// Sets what is shown by rank.
void SetRankMetrics(int rank, const PolicyTotals& totals, Metrics& metrics);

}  // namespace sluice
