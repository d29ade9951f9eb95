// Tests policy ess's schedules: the arithmetic that chooses one for a layer, and the plan of all
// layers, which follows what is observed.
#include <algorithm>
#include <catch2/catch.hpp>
#include <vector>

#include "src/attention/policies/ess/overlap_plan.h"
#include "src/base/rng.h"

namespace sluice {
namespace {

using Choice = PolicyOptions::Ess::Overlap;

// Rates of one device and model, fixed here because AssumedRates changes with the kernels.
const StageRates kRates = [] {
  StageRates rates;
  rates.transfer = {8, 656 / 44.5e3};
  rates.prepare = {30, 0.2};
  rates.attend = {46, 322.0 / (127 * 2048)};
  rates.index = {20, 132 / 3.5e6};
  rates.update_residency = {7, 0.16};
  rates.branch_us = 2.9;
  return rates;
}();

StageTimes Times(double misses, double context, int rows) {
  return TimesOf(kRates, {misses, context, 2048}, rows);
}
Overlap Chosen(double misses, double context, int rows) {
  return ChooseOverlap(Times(misses, context, rows), rows);
}

TEST_CASE("Schedules: PreAttn beside top-k always, and more the more is missed") {
  for (const int rows : {1, 4, 20, 76}) {
    REQUIRE(Chosen(0, 131072, rows) == Overlap::kDa);
    REQUIRE(Chosen(0.001, 32768, rows) == Overlap::kDa);
    const StageTimes times = Times(0, 32768, rows);
    REQUIRE(AddedTime(Overlap::kDa, times) ==
            Approx(times.branch - std::min(times.prepare, times.beside)));
  }
  StageTimes times = Times(300, 131072, 20);
  REQUIRE(ChooseOverlap(times, 20) == Overlap::kDa);
  times = Times(605, 131072, 20);
  REQUIRE(ChooseOverlap(times, 20) == Overlap::kDba);
  REQUIRE(AddedTime(Overlap::kDba, times) < AddedTime(Overlap::kDa, times));
  REQUIRE(AddedTime(Overlap::kDa, times) < AddedTime(Overlap::kNone, times));
  // A short context's indexer hides little, and costs its halves all the same.
  REQUIRE(Chosen(605, 4096, 20) == Overlap::kDa);
  // The processors that attention leaves to the transfer have their price.
  StageTimes spared = Times(300, 131072, 20);
  spared.spared = 200;
  REQUIRE(ChooseOverlap(spared, 20) == Overlap::kNone);
}

TEST_CASE("Schedules: what is assumed chooses as an H200's steps say") {
  // sluice-bench --misses, 76 x 32K, four layers: DA 2.91 ms a step and DBA 3.17 at 80 misses, 3.58
  // and 3.42 at 200.
  const StageRates assumed = AssumedRates(656, 132);
  const auto chosen = [&](double misses) {
    return ChooseOverlap(TimesOf(assumed, {misses, 32768, 2048}, 76), 76);
  };
  REQUIRE(chosen(80) == Overlap::kDa);
  REQUIRE(chosen(200) == Overlap::kDba);
}

TEST_CASE("Schedules: one row has no halves") {
  for (const double misses : {0, 1, 100, 600, 2048}) {
    for (const double context : {2048, 32768, 131072}) {
      REQUIRE(Chosen(misses, context, 1) != Overlap::kDba);
    }
  }
}

TEST_CASE("A schedule never hides more than there is to hide") {
  SplitMix64 random(3);
  for (int i = 0; i < 1000; ++i) {
    const auto draw = [&] { return static_cast<double>(random.Below(1000)); };
    const StageTimes t{draw(),       draw(),       draw(),       draw(),
                       draw() / 100, draw() / 100, draw() / 100, draw() / 10};
    REQUIRE(AddedTime(Overlap::kNone, t) == t.transfer);
    const double most = t.branch - std::min(t.prepare, t.beside);
    for (const Overlap overlap : {Overlap::kDa, Overlap::kDba}) {
      REQUIRE(AddedTime(overlap, t) >= most - 1e-9);
      REQUIRE(AddedTime(ChooseOverlap(t, 8), t) <= AddedTime(overlap, t));
    }
    REQUIRE(AddedTime(ChooseOverlap(t, 8), t) <= t.transfer);
  }
}

TEST_CASE("A profile's nearest point is that of the nearest context, ratio and batch") {
  MissProfile profile;
  REQUIRE(profile.Nearest(1000, 0.2, 1) == nullptr);
  profile.points = {
      {32768, 0.2, 1, {1}}, {32768, 0.2, 64, {2}}, {131072, 0.2, 16, {3}}, {131072, 0.1, 16, {4}}};
  const auto at = [&](int64_t context, double ratio, int64_t batch) {
    return profile.Nearest(context, ratio, batch)->by_layer[0];
  };
  REQUIRE(at(32768, 0.2, 2) == 1);
  REQUIRE(at(32768, 0.2, 76) == 2);
  REQUIRE(at(100000, 0.19, 76) == 3);
  REQUIRE(at(200000, 0.05, 1) == 4);
  REQUIRE(at(1, 1, 1) == 1);
}

// Three layers: without, with few and with many misses.
MissProfile Profile() {
  MissProfile profile;
  profile.points = {{131072, 0.1, 20, {0, 300, 700}}};
  return profile;
}

OverlapPlan::Options Options() {
  OverlapPlan::Options options;
  options.layers = 3;
  options.max_rows = 32;
  options.rates = kRates;
  options.selected = 2048;
  options.context = 131072;
  options.ratio = 0.1;
  return options;
}

std::vector<Overlap> Of(OverlapPlan& plan, int rows) {
  const absl::Span<const Overlap> layers = plan.Of(rows);
  return {layers.begin(), layers.end()};
}

// Adds the policy's counters of further steps of `rows` rows with these misses.
void Step(PolicyStatistics* sums, const std::vector<int64_t>& misses, int64_t steps, int64_t rows) {
  sums->layers.resize(misses.size());
  for (size_t i = 0; i < misses.size(); ++i) {
    sums->layers[i].steps += steps * rows;
    sums->layers[i].missing += steps * rows * misses[i];
  }
}

const std::vector<Overlap> kAllDa(3, Overlap::kDa), kByProfile = {Overlap::kDa, Overlap::kDa,
                                                                  Overlap::kDba};

TEST_CASE("A plan is DA where nothing is known and where all has a place, else a profile's") {
  REQUIRE(Of(*std::make_unique<OverlapPlan>(Options()), 20) == kAllDa);
  OverlapPlan::Options options = Options();
  options.ratio = 1;
  REQUIRE(Of(*std::make_unique<OverlapPlan>(options), 20) == kAllDa);
  options = Options();
  options.profile = Profile();
  OverlapPlan profiled(options);
  REQUIRE(Of(profiled, 20) == kByProfile);
  REQUIRE(LayersBySchedule(profiled.Of(20)) == "da 0-1, dba 2");
  REQUIRE(profiled.statistics().layers == std::array<int, 3>{0, 2, 1});
  REQUIRE(Of(profiled, 1) == kAllDa);
  options.overlap = Choice::kDba;
  OverlapPlan by_hand(options);
  REQUIRE(Of(by_hand, 20) == std::vector<Overlap>(3, Overlap::kDba));
  REQUIRE(Of(by_hand, 1) == kAllDa);
  REQUIRE_FALSE(by_hand.adapts());
}

TEST_CASE("A plan without a profile becomes a profile's by what is seen") {
  OverlapPlan plan(Options());
  REQUIRE(Of(plan, 20) == kAllDa);
  PolicyStatistics sums;
  int looks = 0;
  while (!plan.Change(20)) {
    REQUIRE(++looks < 50);
    Step(&sums, {0, 300, 700}, 32, 20);
    plan.Observe(sums, 131072);
  }
  REQUIRE(looks == OverlapPlan::kSettleLooks);
  REQUIRE(Of(plan, 20) == kByProfile);
  REQUIRE(plan.statistics().changes == 1);
  // Another size was not asked about, and gets its own choice when it comes.
  REQUIRE(Of(plan, 1) == kAllDa);
}

TEST_CASE("Layers fetch for the next step whose transfers would outlast attention") {
  OverlapPlan::Options options = Options();
  const auto ahead = [&] {
    OverlapPlan plan(options);
    return std::vector<bool>{plan.Prefetches(0), plan.Prefetches(1), plan.Prefetches(2)};
  };
  REQUIRE(ahead() == std::vector<bool>(3, false));
  options.prefetch = true;
  REQUIRE(ahead() == std::vector<bool>(3, true));  // nothing is known
  options.profile = Profile();
  REQUIRE(ahead() == std::vector<bool>{false, true, true});
  options.profile.points[0].by_layer = {0, 100, 700};
  REQUIRE(ahead() == std::vector<bool>{false, false, true});
  options.max_rows = 1;
  REQUIRE(ahead() == std::vector<bool>(3, false));
}

TEST_CASE("A plan stays while what is seen stays, and while a change is worth little") {
  OverlapPlan::Options options = Options();
  options.profile = Profile();
  OverlapPlan plan(options);
  plan.Of(20);
  PolicyStatistics sums;
  for (int look = 0; look < 100; ++look) {
    // The misses go up and down by a tenth.
    Step(&sums, {0, look % 2 == 0 ? 270 : 330, look % 2 == 0 ? 650 : 750}, 32, 20);
    plan.Observe(sums, 131072);
    REQUIRE_FALSE(plan.Change(20));
  }
  REQUIRE(Of(plan, 20) == kByProfile);
}

TEST_CASE("A plan is held for a while after a change") {
  OverlapPlan::Options options = Options();
  options.profile = Profile();
  OverlapPlan plan(options);
  plan.Of(20);
  PolicyStatistics sums;
  int changes = 0, last = -OverlapPlan::kHoldLooks;
  for (int look = 0; look < 400; ++look) {
    // A load that swings between two extremes, each long enough to be believed.
    const bool many = look / 8 % 2 == 0;
    Step(&sums, many ? std::vector<int64_t>{900, 900, 900} : std::vector<int64_t>{0, 0, 0}, 32, 20);
    plan.Observe(sums, 131072);
    if (!plan.Change(20)) continue;
    REQUIRE(look - last >= OverlapPlan::kHoldLooks);
    last = look;
    ++changes;
  }
  REQUIRE(changes > 2);
  REQUIRE(plan.statistics().changes == changes);
}

TEST_CASE("A plan that changes is the best by what is seen, and clearly better than before") {
  SplitMix64 random(11);
  for (int round = 0; round < 200; ++round) {
    OverlapPlan plan(Options());
    const int rows = 1 + static_cast<int>(random.Below(32));
    const std::vector<Overlap> before = Of(plan, rows);
    PolicyStatistics sums;
    const double context = 4096 << random.Below(6);
    std::vector<int64_t> misses;
    for (int i = 0; i < 3; ++i) misses.push_back(static_cast<int64_t>(random.Below(900)));
    for (int look = 0; look < 8; ++look) {
      Step(&sums, misses, 32, rows);
      plan.Observe(sums, context);
    }
    const bool changed = plan.Change(rows);
    const std::vector<Overlap> now = Of(plan, rows);
    const double gain = plan.AddedTimeOf(before, rows) - plan.AddedTimeOf(now, rows);
    if (changed) {
      REQUIRE(gain >= 3 * OverlapPlan::kLeastGainUs);
      for (size_t i = 0; i < 3; ++i) {
        REQUIRE(now[i] == Chosen(static_cast<double>(misses[i]), context, rows));
      }
    } else {
      REQUIRE(now == before);
    }
    REQUIRE_FALSE(plan.Change(rows));  // nothing new was seen
  }
}

TEST_CASE("A look at too few rows waits for more") {
  OverlapPlan plan(Options());
  plan.Of(9);
  PolicyStatistics sums;
  for (int i = 0; i < 3; ++i) {
    Step(&sums, {0, 0, 0}, 2, 1);
    plan.Observe(sums, 131072);
  }
  for (int look = 0; look < OverlapPlan::kSettleLooks; ++look) {
    REQUIRE_FALSE(plan.Change(9));
    Step(&sums, {1500, 1500, 1500}, 32, 1);
    plan.Observe(sums, 131072);
  }
  REQUIRE(plan.Change(9));
  REQUIRE(Of(plan, 9) == std::vector<Overlap>(3, Overlap::kDba));
}

}  // namespace
}  // namespace sluice
