#include "src/profile/intervals.h"

#include <algorithm>

#include "src/base/status_macros.h"

namespace sluice {

void ShareSeries::Add(int64_t step, double share) {
  SLUICE_CHECK(step >= 1);
  const auto i = static_cast<size_t>(step - 1);
  if (i >= sums_.size()) {
    sums_.resize(i + 1);
    counts_.resize(i + 1);
  }
  sums_[i] += share;
  ++counts_[i];
}

std::vector<double> ShareSeries::Means() const {
  std::vector<double> means(sums_.size());
  for (size_t i = 0; i < means.size(); ++i) {
    if (counts_[i] > 0) means[i] = sums_[i] / static_cast<double>(counts_[i]);
  }
  return means;
}

int32_t IntervalOf(const std::vector<double>& shares, double limit) {
  int32_t steps = 0;
  while (static_cast<size_t>(steps) < shares.size() && shares[static_cast<size_t>(steps)] < limit) {
    ++steps;
  }
  return std::max(steps, 1);
}

}  // namespace sluice
