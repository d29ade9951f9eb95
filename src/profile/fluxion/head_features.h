// The 41 features by which policy fluxion predicts budgets, in float64. kernels/fluxion_params.h
// says what each of them is; it is the operators' contract, and this is their reference and the
// source of training samples.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/fluxion_params.h"
#include "src/profile/fluxion/group_attention.h"

namespace sluice {

// Mean, variance, skewness and kurtosis of a population. The kurtosis of a normal distribution
// is 3. A moment of no values or of equal ones is 0.
struct Moments {
  double mean = 0, variance = 0, skewness = 0, kurtosis = 0;
};
Moments MomentsOf(const std::vector<double>& values);

// Returns the lengths of rows [begin, end) of [rows][dim].
std::vector<double> RowLengths(const float* rows, int64_t begin, int64_t end, int64_t dim);

// What FluxionAnchors::kv has of a KV head.
struct AnchorCache {
  std::array<double, kernels::kAnchorKvNumbers> numbers;
  std::vector<double> mean_key;  // [head_dim]
};
AnchorCache MeasureCache(const HeadCache& cache, const kernels::FluxionSegments& segments);

// What FluxionAnchors::heads has of a query head.
struct AnchorHead {
  Moments z;
  std::array<double, 3> lse, lengths;  // sink, cpu segment, local tokens
  double q_length = 0;
  std::array<double, kernels::kFluxionLevels> budgets;
  std::vector<double> q;  // [head_dim]
};
// `bound` is the error that the budgets keep to.
AnchorHead MeasureAnchor(const GroupAttention& attention, int64_t g, double bound);

// A row of a layer, as its query heads share it.
struct FeatureRow {
  int64_t layer = 0;
  double resident = 0, anchor_resident = 0;  // features 39 and 40
};
// Returns the features of query head `head`, which is the g-th of its group.
std::array<float, kernels::kFluxionFeatures> HeadFeatures(const FeatureRow& row, int64_t head,
                                                          const GroupAttention& attention,
                                                          int64_t g, const AnchorCache& cache,
                                                          const AnchorHead& anchor);

}  // namespace sluice
