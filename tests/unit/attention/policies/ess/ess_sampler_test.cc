// Tests what policy ess learns from its own traffic: misses of pools of other sizes, held to pools
// of those sizes, and the sampler that watches steps while they are recorded programs.
#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <list>
#include <memory>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "src/attention/policies/ess/selection_reuse.h"
#include "src/base/rng.h"
#include "tests/unit/attention/latent_rig.h"

namespace sluice {
namespace {

// A pool of entries as UpdateResidency keeps it: what was used longest ago leaves, by whole steps.
class Pool {
 public:
  // Returns the misses of a step; `written` is its new entry.
  int64_t Step(int64_t places, const std::vector<int32_t>& selected, int32_t written) {
    int64_t missed = 0;
    Use(written);
    for (const int32_t entry : selected) missed += Has(entry) ? 0 : 1;
    for (const int32_t entry : selected) Use(entry);
    while (std::ssize(order_) > places) order_.pop_back();
    return missed;
  }

 private:
  bool Has(int32_t entry) const {
    return std::find(order_.begin(), order_.end(), entry) != order_.end();
  }
  void Use(int32_t entry) {
    order_.remove(entry);
    order_.push_front(entry);
  }
  std::list<int32_t> order_;  // newest first
};

// A selection that drifts: `fresh` of its entries are replaced in each step.
class Drift {
 public:
  Drift(int top_k, int fresh, uint64_t seed) : top_k_(top_k), fresh_(fresh), random_(seed) {}
  const std::vector<int32_t>& Next(int64_t tokens) {
    for (int i = 0; i < fresh_ && !list_.empty(); ++i) {
      list_.erase(list_.begin() + static_cast<std::ptrdiff_t>(random_.Below(list_.size())));
    }
    while (std::ssize(list_) < top_k_) {
      const auto entry = static_cast<int32_t>(random_.Below(static_cast<uint64_t>(tokens)));
      if (std::find(list_.begin(), list_.end(), entry) == list_.end()) list_.push_back(entry);
    }
    return list_;
  }

 private:
  const int top_k_, fresh_;
  SplitMix64 random_;
  std::vector<int32_t> list_;
};

TEST_CASE("what pools of other sizes would miss is what such pools miss") {
  constexpr int kTopK = 48, kTokens = 1000;
  constexpr int kFresh[] = {0, 3, 12};  // by layer
  SelectionReuse reuse(3, kTopK);
  std::vector<std::vector<Pool>> pools(3);
  std::vector<std::vector<int64_t>> missed(3);
  std::vector<Drift> drifts;
  for (size_t layer = 0; layer < 3; ++layer) {
    drifts.emplace_back(kTopK, kFresh[layer], layer + 1);
    pools[layer].resize(SelectionReuse::kRatios.size());
    missed[layer].resize(SelectionReuse::kRatios.size());
  }
  constexpr int kSteps = SelectionReuse::kWarmSteps + SelectionReuse::kCountedSteps;
  for (int step = 0; step < kSteps; ++step) {
    REQUIRE(!reuse.done());
    const int64_t tokens = kTokens + step;
    std::vector<int32_t> selected;
    for (size_t layer = 0; layer < 3; ++layer) {
      const std::vector<int32_t>& list = drifts[layer].Next(tokens);
      selected.insert(selected.end(), list.begin(), list.end());
      for (size_t i = 0; i < pools[layer].size(); ++i) {
        const auto places =
            static_cast<int64_t>(SelectionReuse::kRatios[i] * static_cast<double>(tokens));
        const int64_t misses = pools[layer][i].Step(places, list, static_cast<int32_t>(tokens - 1));
        if (step >= SelectionReuse::kWarmSteps) missed[layer][i] += misses;
      }
    }
    reuse.Add(tokens, selected);
  }
  REQUIRE(reuse.done());
  const auto points = reuse.Points();
  REQUIRE(points.size() == SelectionReuse::kRatios.size());
  for (size_t i = 0; i < points.size(); ++i) {
    CHECK(points[i].ratio == SelectionReuse::kRatios[i]);
    CHECK(points[i].context == Approx(kTokens + 192).margin(1));
    for (size_t layer = 0; layer < 3; ++layer) {
      // Entries of one step leave a pool one by one, and are counted as if they left together.
      const double real = static_cast<double>(missed[layer][i]) / SelectionReuse::kCountedSteps;
      CAPTURE(points[i].ratio, layer, real, points[i].by_layer[layer]);
      CHECK(points[i].by_layer[layer] == Approx(real).epsilon(0.1).margin(0.6));
      if (i > 0) CHECK(points[i].by_layer[layer] <= points[i - 1].by_layer[layer]);
    }
  }
  // The check can fail: the layers differ, and so do the sizes.
  CHECK(points[3].by_layer[2] > 2 * points[3].by_layer[1]);
  CHECK(points[0].by_layer[2] > points[6].by_layer[2] + 1);
}

TEST_CASE("a sequence that begins anew is not taken for the one before") {
  SelectionReuse reuse(1, 4);
  for (int round = 0; round < 3; ++round) {
    reuse.Begin();
    for (int step = 0; step < SelectionReuse::kWarmSteps + 50; ++step) {
      const std::vector<int32_t> list = {0, 1, 2, 100 * round + 3};
      reuse.Add(400 + step, list);
    }
  }
  REQUIRE(reuse.done());
  for (const MissProfile::Point& point : reuse.Points()) CHECK(point.by_layer[0] == 0);
}

TEST_CASE("policy ess learns what it would miss from its own steps, and then stops looking") {
  for (const int bucket : {0, 2}) {
    testing::LatentRig::Shape shape;
    shape.max_context = 1024;
    shape.row_bucket = bucket;
    shape.kernels = "portable";
    PolicyOptions::Ess ess;
    ess.least_places = 64;
    ess.sparse_memory_ratio = 0.2;
    std::atomic<int> calls{0};
    std::vector<MissProfile::Point> points;
    ess.on_misses = [&](std::vector<MissProfile::Point> found) {
      points = std::move(found);
      ++calls;
    };
    testing::LatentRig rig(shape, ess);
    REQUIRE(rig.Admit(0, 7, 600, 1000));
    REQUIRE(rig.Admit(1, 8, 500, 1000));
    rig.EndPrompt(0);
    rig.EndPrompt(1);
    rig.AwaitWarm(0);
    rig.AwaitWarm(1);
    for (int step = 0; step < SelectionReuse::kWarmSteps; ++step) rig.Step({0, 1});
    const PolicyStatistics warm = rig.policy().Statistics();
    int steps = 0;
    for (; steps < 250 && calls == 0; ++steps) rig.Step({0, 1});
    for (int i = 0; i < 1000 && calls == 0; ++i) absl::SleepFor(absl::Milliseconds(10));
    REQUIRE(calls == 1);
    REQUIRE(points.size() == SelectionReuse::kRatios.size());
    const PolicyStatistics after = rig.policy().Statistics();
    for (size_t layer = 0; layer < static_cast<size_t>(shape.layers); ++layer) {
      // Both sequences are counted here and one of them there, over nearly the same steps.
      const double real =
          static_cast<double>(after.layers[layer].missing - warm.layers[layer].missing) /
          static_cast<double>(after.layers[layer].steps - warm.layers[layer].steps);
      CAPTURE(bucket, layer, real);
      CHECK(points[3].by_layer[layer] == Approx(real).epsilon(0.25).margin(1.0));
    }
    const int recorded = rig.recordings();
    for (int step = 0; step < 5; ++step) rig.Step({0, 1});
    CHECK(calls == 1);
    if (bucket > 0) CHECK(rig.recordings() > 0);
    CHECK(rig.recordings() <= recorded + 2);
  }
}

}  // namespace
}  // namespace sluice
