#include "src/attention/policies/clo/head_thresholds.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

TEST_CASE("a head's threshold falls from eta to -1 with its gate") {
  CHECK(ThresholdOf(1, 0.8) == Approx(0.8));
  CHECK(ThresholdOf(0, 0.8) == Approx(-1));
  CHECK(ThresholdOf(-0.5, 0.8) == Approx(-1));
  CHECK(ThresholdOf(2, 0.8) == Approx(0.8));
  // The paper's equations by hand: 0.9^3 of 36.87 degrees and the rest of 180 are 75.66 degrees.
  CHECK(ThresholdOf(0.9, 0.8) == Approx(std::cos(75.66 / 180 * M_PI)).margin(1e-4));
  // Below a gate of 0.857 it is negative: such a head keeps whatever it has.
  CHECK(ThresholdOf(0.856, 0.8) < 0);
  CHECK(ThresholdOf(0.858, 0.8) > 0);
  float last = -1;
  for (int i = 0; i <= 20; ++i) {
    const float threshold = ThresholdOf(0.05 * i, 0.9);
    CHECK(threshold >= last);
    last = threshold;
  }
}

TEST_CASE("a head is the harder, the more its queries turn for its threshold") {
  CHECK(DifficultyOf(0.8, 0.75) == Approx(0.15));
  CHECK(DifficultyOf(0.8, 1) == Approx(-0.1));
  CHECK(DifficultyOf(-1, 0.5) < DifficultyOf(0.8, 0.9));
}

TEST_CASE("layer 0 is persistent first, then the hardest heads") {
  using Heads = std::vector<uint8_t>;
  const std::vector<float> difficulty = {-1, -1, 0.1f, 0.4f, 0.4f, 0.2f};
  CHECK(HardestHeads(3, 2, difficulty, 0).empty());
  CHECK(HardestHeads(3, 2, difficulty, 0.05).empty());
  CHECK(HardestHeads(3, 2, difficulty, 1.0 / 6) == Heads{1, 0, 0, 0, 0, 0});
  CHECK(HardestHeads(3, 2, difficulty, 2.0 / 6) == Heads{1, 1, 0, 0, 0, 0});
  CHECK(HardestHeads(3, 2, difficulty, 3.0 / 6) == Heads{1, 1, 0, 1, 0, 0});  // the lower of equals
  CHECK(HardestHeads(3, 2, difficulty, 5.0 / 6) == Heads{1, 1, 0, 1, 1, 1});
  CHECK(HardestHeads(3, 2, difficulty, 1) == Heads{1, 1, 1, 1, 1, 1});
  // Without a profile they are spread.
  CHECK(HardestHeads(3, 2, {}, 4.0 / 6) == Heads{1, 1, 1, 0, 1, 0});
  SplitMix64 random(TestSeed());
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<float> drawn;
    for (int i = 0; i < 12 * 8; ++i) drawn.push_back(static_cast<float>(random.Uniform()));
    const double share = random.Uniform();
    const Heads heads = HardestHeads(12, 8, trial % 2 == 0 ? drawn : std::vector<float>(), share);
    CHECK(std::ranges::count(heads, 1) == std::llround(share * 96));
    if (heads.empty() || trial % 2 != 0) continue;
    float least = 2, most_left = -1;
    for (size_t i = 8; i < heads.size(); ++i) {
      (heads[i] != 0 ? least : most_left) =
          heads[i] != 0 ? std::min(least, drawn[i]) : std::max(most_left, drawn[i]);
    }
    CHECK(least >= most_left);
  }
}

}  // namespace
}  // namespace sluice
