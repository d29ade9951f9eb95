// How often a layer has to recall, given how its CPU share grows (Scout, section 3.4).
#pragma once

#include <cstdint>
#include <vector>

namespace sluice {

// Shares of the budget that the CPU attends to: one sum over samples for each number of steps since
// the working set was made.
class ShareSeries {
 public:
  // Adds a sample. `step` 1 is the first step with that working set.
  void Add(int64_t step, double share);
  // Returns the means, indexed by step - 1; 0 where nothing was measured.
  std::vector<double> Means() const;

 private:
  std::vector<double> sums_;
  std::vector<int64_t> counts_;
};

// Returns the largest number of steps from one recall to the next with which no step's mean share
// reaches `limit`; a recall after step n takes effect in step n + 1. The result is at least 1 and
// at most `shares.size()`, beyond which nothing is known.
int32_t IntervalOf(const std::vector<double>& shares, double limit);

}  // namespace sluice
