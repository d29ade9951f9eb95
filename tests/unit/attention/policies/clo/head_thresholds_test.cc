#include "src/attention/policies/clo/head_thresholds.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

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

TEST_CASE("a layer prefetches as many heads as the link carries while it computes") {
  CHECK(PrefetchableHeads(250e-6, 50e9, 12.5e6) == Approx(1));
  CHECK(PrefetchableHeads(250e-6, 50e9, 25e6) == Approx(0.5));
}

using Heads = std::vector<uint8_t>;

TEST_CASE("layer 0 is persistent first, then hard heads of the layers that miss most") {
  const HeadLoads loads = {{-1, -1, 0.1f, 0.4f, 0.4f, 0.2f}, {0, 0, 0.5f, 0.25f, 0.3f, 0.3f}};
  const auto heads = [&](int count) { return PersistentHeads(3, 2, loads, count / 6.0, 0); };
  CHECK(heads(0).empty());
  CHECK(PersistentHeads(3, 2, loads, 0.05, 0).empty());
  CHECK(heads(1) == Heads{1, 0, 0, 0, 0, 0});
  CHECK(heads(2) == Heads{1, 1, 0, 0, 0, 0});
  CHECK(heads(3) == Heads{1, 1, 0, 1, 0, 0});  // layer 1 misses most, and then has 0.5
  CHECK(heads(4) == Heads{1, 1, 0, 1, 1, 0});
  CHECK(heads(5) == Heads{1, 1, 1, 1, 1, 0});
  CHECK(heads(6) == Heads{1, 1, 1, 1, 1, 1});
  // What a layer hides needs no persistence.
  CHECK(PersistentHeads(3, 2, loads, 1, 0.5) == Heads{1, 1, 0, 1, 1, 0});
  CHECK(PersistentHeads(3, 2, loads, 1, 0.7) == Heads{1, 1, 0, 1, 0, 0});
  CHECK(PersistentHeads(3, 2, loads, 1, 2) == Heads{1, 1, 0, 0, 0, 0});
  // Heads that never miss are persistent too if the share says so.
  CHECK(PersistentHeads(2, 2, {{}, {0, 0, 0, 0}}, 1, 0) == Heads{1, 1, 1, 1});
  CHECK(PersistenceOrder(3, 2, loads, 0) == std::vector<int64_t>{0, 1, 3, 4, 2, 5});
  CHECK(PersistenceOrder(3, 2, loads, 0.5) == std::vector<int64_t>{0, 1, 3, 4});
  // Layers whose queries are predicted badly come after layer 0, the worst first.
  HeadLoads unpredictable = loads;
  unpredictable.predicted = {0.1f, 0.89f, 0.5f};
  CHECK(PersistenceOrder(3, 2, unpredictable, 0.5) == std::vector<int64_t>{0, 1, 4, 5, 2, 3});
  unpredictable.predicted = {0.1f, 0.9f, 0.5f};
  CHECK(PersistenceOrder(3, 2, unpredictable, 0.5) == std::vector<int64_t>{0, 1, 4, 5, 3});
  CHECK(IsUnpredictable(unpredictable.predicted, 2));
  CHECK_FALSE(IsUnpredictable(unpredictable.predicted, 1));
  CHECK_FALSE(IsUnpredictable({}, 1));
  // Without a profile they are spread.
  CHECK(PersistentHeads(3, 2, {}, 4.0 / 6, 0) == Heads{1, 1, 1, 0, 1, 0});
}

TEST_CASE("no layer's other heads miss by a head more than another's, and hard ones go first") {
  constexpr int64_t kLayers = 12, kHeads = 8;
  SplitMix64 random(TestSeed());
  for (int trial = 0; trial < 50; ++trial) {
    HeadLoads loads;
    for (int i = 0; i < kLayers * kHeads; ++i) {
      loads.difficulty.push_back(static_cast<float>(random.Uniform()));
      loads.misses.push_back(static_cast<float>(random.Uniform()));
    }
    const double share = random.Uniform();
    const Heads heads = PersistentHeads(kLayers, kHeads, loads, share, 0);
    REQUIRE(std::ranges::count(heads, 1) == std::llround(share * kLayers * kHeads));
    if (heads.empty()) continue;
    std::vector<double> left;                                // misses of a layer's other heads
    double given = std::numeric_limits<double>::infinity();  // the least before a layer's last gift
    for (int64_t layer = 1; layer < kLayers; ++layer) {
      double others = 0;
      float least = 2, most_left = -1, last = 0;
      for (int64_t head = layer * kHeads; head < (layer + 1) * kHeads; ++head) {
        const auto i = static_cast<size_t>(head);
        if (heads[i] == 0) {
          others += double{loads.misses[i]};
          most_left = std::max(most_left, loads.difficulty[i]);
        } else if (loads.difficulty[i] < least) {
          least = loads.difficulty[i];
          last = loads.misses[i];
        }
      }
      CHECK(least >= most_left);
      left.push_back(others);
      if (least <= 1) given = std::min(given, others + double{last});
    }
    if (std::isfinite(given)) CHECK(std::ranges::max(left) <= given + 1e-6);
  }
}

}  // namespace
}  // namespace sluice
