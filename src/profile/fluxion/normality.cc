#include "src/profile/fluxion/normality.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace sluice {
namespace {

// The farthest value that NormalQuantile can return: no share that a double can hold lies beyond.
constexpr double kFarthest = 40;

std::array<double, kQqPoints> NormalPercentiles() {
  std::array<double, kQqPoints> out;
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = NormalQuantile(static_cast<double>(i + 1) / (kQqPoints + 1));
  }
  return out;
}

}  // namespace

double NormalQuantile(double p) {
  double low = -kFarthest, high = kFarthest;
  while (true) {
    const double middle = (low + high) / 2;
    if (middle == low || middle == high) return middle;
    (std::erfc(-middle / std::numbers::sqrt2) / 2 < p ? low : high) = middle;
  }
}

Normality MeasureNormality(const std::vector<double>& values) {
  static const std::array<double, kQqPoints> normal = NormalPercentiles();
  Normality out;
  out.moments = MomentsOf(values);
  out.largest_gap = std::nan("");
  if (!(out.moments.variance > 0)) return out;
  std::vector<double> z = values;
  const double deviation = std::sqrt(out.moments.variance);
  for (double& value : z) value = (value - out.moments.mean) / deviation;
  std::sort(z.begin(), z.end());
  out.largest_gap = 0;
  for (size_t i = 0; i < out.quantiles.size(); ++i) {
    const size_t rank = (i + 1) * z.size() / (kQqPoints + 1);
    out.quantiles[i] = static_cast<float>(z[std::min(rank, z.size() - 1)]);
    out.largest_gap = std::max(out.largest_gap, std::abs(double{out.quantiles[i]} - normal[i]));
  }
  for (const double value : z) {
    const double bin = (value + kHistogramEnd) * kHistogramBins / (2 * kHistogramEnd);
    const double inside = std::clamp(bin, 0.0, kHistogramBins - 1.0);
    out.histogram[static_cast<size_t>(inside)] += 1.0f / static_cast<float>(z.size());
  }
  return out;
}

}  // namespace sluice
