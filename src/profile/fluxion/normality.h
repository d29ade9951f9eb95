// How near values come to a normal distribution (Fluxion, figure 11): moments, a histogram and the
// points of a Q-Q plot, of values less their mean and in units of their deviation.
#pragma once

#include <array>
#include <vector>

#include "src/profile/fluxion/head_features.h"

namespace sluice {

// Returns the value below which a share of `p`, between 0 and 1, of N(0, 1) lies.
double NormalQuantile(double p);

// Points of the Q-Q plot are the percentiles 1 to 99: what lies further out is a matter of a few
// values.
inline constexpr int kQqPoints = 99;
// Bins of the histogram have the same width and reach from -kHistogramEnd to kHistogramEnd
// deviations; the outer ones hold what lies further out, too.
inline constexpr int kHistogramBins = 40;
inline constexpr double kHistogramEnd = 4;

struct Normality {
  Moments moments;
  std::array<float, kQqPoints> quantiles = {};       // in deviations from the mean
  std::array<float, kHistogramBins> histogram = {};  // shares of the values
  // The largest distance of a quantile from that of N(0, 1).
  double largest_gap = 0;
};
// Measures how near `values` come to a normal distribution. If there are none, or all are equal,
// everything but the mean is 0 and the gap is not a number. Quantiles are values at the nearest
// rank.
Normality MeasureNormality(const std::vector<double>& values);

}  // namespace sluice
