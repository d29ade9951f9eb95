#include "src/profile/intervals.h"

#include <catch2/catch.hpp>

namespace sluice {

TEST_CASE("an interval is the longest with which no step reaches the limit") {
  CHECK(IntervalOf({0.04, 0.06, 0.09, 0.12, 0.15}, 0.12) == 3);
  CHECK(IntervalOf({0.04, 0.06, 0.09}, 0.12) == 3);        // No more was measured.
  CHECK(IntervalOf({0.04, 0.13, 0.05, 0.05}, 0.12) == 1);  // A step in between counts.
  CHECK(IntervalOf({0.5, 0.6}, 0.12) == 1);                // No interval is shorter than a step.
  CHECK(IntervalOf({}, 0.12) == 1);
}

TEST_CASE("shares are averaged by steps since the working set was made") {
  ShareSeries series;
  series.Add(1, 0.1);
  series.Add(2, 0.2);
  series.Add(1, 0.3);
  series.Add(4, 0.4);
  const std::vector<double> means = series.Means();
  REQUIRE(means.size() == 4);
  CHECK(means[0] == Approx(0.2));
  CHECK(means[1] == Approx(0.2));
  CHECK(means[2] == 0);
  CHECK(means[3] == Approx(0.4));
}

}  // namespace sluice
