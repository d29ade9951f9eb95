// Tests policy ess on made-up rows: what it attends to, what it fetches, and what it keeps.
#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <set>

#include "src/attention/policies/ess/ess_options.h"
#include "src/attention/policies/ess/pool_shape.h"
#include "src/attention/policies/ess/pool_warmer.h"
#include "src/attention/policy_factory.h"
#include "src/device/kernel_set.h"
#include "tests/support/device.h"
#include "tests/test_main.h"
#include "tests/unit/attention/latent_rig.h"
#include "tests/unit/attention/policy_rig.h"  // RelativeError

namespace sluice {
namespace {

using testing::LatentRig;
using testing::RelativeError;
using Overlap = PolicyOptions::Ess::Overlap;
using Result = std::vector<std::vector<std::vector<float>>>;

PolicyOptions::Ess SmallPools(double ratio = 0.2) {
  PolicyOptions::Ess ess;
  ess.sparse_memory_ratio = ratio;
  ess.least_places = 48;
  ess.overlap = Overlap::kDa;
  return ess;
}

// The last layer gains with every place, the others hardly, so it has most of the places.
PolicyOptions::Ess Divided(const LatentRig::Shape& shape, double ratio = 0.2) {
  PolicyOptions::Ess ess = SmallPools(ratio);
  ess.least_places = 0;
  ess.divide_places = true;
  for (const double profiled : {0.08, 0.9}) {
    MissProfile::Point& point = ess.profile.points.emplace_back();
    point.context = shape.max_context;
    point.ratio = profiled;
    point.batch = 1;
    point.by_layer.assign(static_cast<size_t>(shape.layers), 5 - profiled);
    point.by_layer.back() = 1000 * (1 - profiled);
  }
  return ess;
}

std::vector<int64_t> PlacesByLayer(const LatentRig::Shape& shape, const PolicyOptions::Ess& ess,
                                   int64_t total) {
  PolicyOptions options;
  options.ess = ess;
  options.slots = shape.slots;
  options.max_context = shape.max_context;
  options.index_top_k = shape.top_k;
  return EssShapeOf(options, shape.layers, shape.block_tokens, 0).PlacesByLayer(total);
}

void CheckRows(LatentRig& rig, const Result& got, const std::vector<uint64_t>& seeds,
               const std::vector<int>& positions) {
  for (size_t layer = 0; layer < got.size(); ++layer) {
    for (size_t r = 0; r < seeds.size(); ++r) {
      INFO("layer " << layer << ", stream " << seeds[r] << ", position " << positions[r]);
      REQUIRE(RelativeError(got[layer][r],
                            rig.Naive(seeds[r], static_cast<int>(layer), positions[r])) < 1e-5);
    }
  }
}

TEST_CASE("ess: a row attends to what its indexer selects, wherever it lies") {
  for (const double ratio : {0.0, 0.2, 1.0}) {
    LatentRig rig({}, SmallPools(ratio));
    REQUIRE(rig.Admit(0, 1, 200, 400));
    REQUIRE(rig.Admit(1, 2, 37, 300));  // shorter than its pool, and outgrows it
    rig.EndPrompt(0, rig.Hints(1, 200, 8));
    rig.EndPrompt(1);
    for (int step = 0; step < 60; ++step) {
      const std::vector<int> at = {rig.position(0), rig.position(1)};
      const Result got = rig.Step({0, 1});
      if (step % 6 == 0 || step > 56) CheckRows(rig, got, {1, 2}, at);
    }
  }
}

TEST_CASE("ess: places divided among layers by what they miss change no result") {
  const LatentRig::Shape shape;
  const PolicyOptions::Ess ess = Divided(shape);
  const std::vector<int64_t> places = PlacesByLayer(shape, ess, 400);
  REQUIRE(places.front() < places.back());
  LatentRig rig(shape, ess);
  for (const uint64_t round : {0, 10}) {  // the second one's pages are the first one's
    REQUIRE(rig.Admit(0, round + 1, 200, 400));
    REQUIRE(rig.Admit(1, round + 2, 37, 300));
    REQUIRE(rig.Admit(2, round + 3, 20, 60));
    rig.EndPrompt(0, rig.Hints(round + 1, 200, 8));
    rig.EndPrompt(1);
    rig.EndPrompt(2);
    for (int step = 0; step < 40; ++step) {
      const std::vector<int> at = {rig.position(0), rig.position(1), rig.position(2)};
      const Result got = rig.Step({0, 1, 2});
      if (step % 5 == 0 || step > 36) {
        CheckRows(rig, got, {round + 1, round + 2, round + 3}, at);
      }
    }
    for (int slot = 0; slot < 3; ++slot) rig.policy().Release(slot);
  }
}

TEST_CASE("ess: entries that are brought for the next step change no result") {
  LatentRig::Shape shape;
  shape.drift = 0.1;
  shape.row_bucket = GENERATE(0, 4);
  PolicyOptions::Ess ess = SmallPools();
  ess.overlap = GENERATE(Overlap::kNone, Overlap::kDa, Overlap::kDba);
  ess.prefetch = GENERATE(1, 15, 32);  // with 32, a pool of 80 holds exactly all of them
  LatentRig rig(shape, ess);
  for (const uint64_t round : {0, 10}) {
    REQUIRE(rig.Admit(0, round + 1, 200, 300));
    REQUIRE(rig.Admit(1, round + 2, 37, 120));
    REQUIRE(rig.Admit(2, round + 3, 20, 70));
    rig.EndPrompt(0, rig.Hints(round + 1, 200, 8));
    rig.EndPrompt(1);
    rig.EndPrompt(2);
    for (int step = 0; step < 40; ++step) {
      const std::vector<int> at = {rig.position(0), rig.position(1), rig.position(2)};
      const Result got = rig.Step({0, 1, 2});
      if (step % 9 == 0 || step > 37) CheckRows(rig, got, {round + 1, round + 2, round + 3}, at);
    }
    for (int slot = 0; slot < 3; ++slot) rig.policy().Release(slot);
  }
}

// More entries than a warm-up by lists fetches.
TEST_CASE(
    "ess: a pool that holds its whole sequence misses nothing, whatever its prompt selected") {
  LatentRig::Shape shape;
  shape.layers = 2;
  shape.slots = 1;
  shape.drift = 0.3;
  shape.max_context = static_cast<int>(PoolWarmer::kMostEntries) + 200;
  shape.pool_bytes = size_t{48} << 20;
  const int context = shape.max_context - 60;
  LatentRig rig(shape, SmallPools(/*ratio=*/0));
  REQUIRE(rig.policy().last_rows_wanted(shape.max_context) == 0);
  for (const int computed : {0, 40}) {  // rows of the prompt that are computed here
    REQUIRE(rig.Admit(0, 3, context - computed, shape.max_context, context));
    if (computed > 0) rig.Prompt(0, computed);
    rig.EndPrompt(0);
    for (int step = 0; step < 20; ++step) {
      const int at = rig.position(0);
      const Result got = rig.Step({0});
      if (step % 10 == 9) CheckRows(rig, got, {3}, {at});
    }
    for (const PolicyStatistics::Layer& layer : rig.policy().Statistics().layers) {
      REQUIRE(layer.selected > 0);
      REQUIRE(layer.missing == 0);
    }
    rig.policy().Release(0);
  }
}

Result Run(const PolicyOptions::Ess& ess, int row_bucket, const std::string& name = "ess") {
  LatentRig::Shape shape;
  shape.row_bucket = row_bucket;
  LatentRig rig(shape, ess, name);
  Result all;
  for (int slot = 0; slot < 3; ++slot) {
    REQUIRE(rig.Admit(slot, static_cast<uint64_t>(slot) + 5, 150 + 30 * slot, 400));
    rig.EndPrompt(slot, rig.Hints(static_cast<uint64_t>(slot) + 5, 150 + 30 * slot, 4));
  }
  for (int step = 0; step < 20; ++step) {
    const Result got = rig.Step({0, 1, 2});
    all.insert(all.end(), got.begin(), got.end());
  }
  return all;
}

TEST_CASE("ess: schedules and recorded, padded steps change no bit") {
  PolicyOptions::Ess ess = SmallPools();
  ess.overlap = Overlap::kNone;
  const Result want = Run(ess, 0);
  for (const Overlap overlap : {Overlap::kDa, Overlap::kDba, Overlap::kLayerWise}) {
    ess.overlap = overlap;
    REQUIRE(Run(ess, 0) == want);
    REQUIRE(Run(ess, 4) == want);
  }
}

// Runs sequences that fit their pools, then others that do not.
std::pair<Result, int> RunUntilMissing(Overlap overlap, int row_bucket) {
  LatentRig::Shape shape;
  shape.row_bucket = row_bucket;
  shape.drift = 0.1;
  shape.max_context = 1024;
  PolicyOptions::Ess ess = SmallPools(0.1);
  ess.least_places = 96;
  ess.overlap = overlap;
  // Under these rates halves pay at any number of misses.
  StageRates& rates = ess.profile.rates;
  rates.device = "cpu";
  rates.transfer.each_us = 100;
  rates.prepare.fixed_us = rates.attend.fixed_us = 30;
  rates.index = {10, 1};
  rates.branch_us = 3;
  LatentRig rig(shape, ess);
  Result all;
  const auto run = [&](int context, int steps) {
    for (int slot = 0; slot < 2; ++slot) {
      const auto seed = static_cast<uint64_t>(slot + context);
      REQUIRE(rig.Admit(slot, seed, context, context + steps));
      rig.EndPrompt(slot, rig.Hints(seed, context, 4));
    }
    for (int step = 0; step < steps; ++step) {
      const Result got = rig.Step({0, 1});
      all.insert(all.end(), got.begin(), got.end());
    }
    for (int slot = 0; slot < 2; ++slot) rig.policy().Release(slot);
  };
  REQUIRE(rig.policy().DescribeSteps(row_bucket == 0 ? 2 : row_bucket) ==
          (overlap == Overlap::kNone ? "none 0-2" : "da 0-2"));
  for (int i = 0; i < 4; ++i) run(30 + i, 60);
  REQUIRE(rig.policy().Schedules().changes == 0);
  run(300, 650);
  if (overlap == Overlap::kLayerWise) {
    REQUIRE(rig.policy().Schedules().changes == 1);
    REQUIRE(rig.policy().Schedules().layers == std::array<int, 3>{0, 0, 3});
  }
  const PolicyStatistics statistics = rig.policy().Statistics();
  REQUIRE(statistics.layers[0].missing > 500);
  return {all, rig.recordings()};
}

TEST_CASE("ess: schedules follow what is missed, and no bit changes with them") {
  const auto [want, none] = RunUntilMissing(Overlap::kNone, 0);
  REQUIRE(none == 0);
  for (const int row_bucket : {0, 16}) {
    const auto [got, recordings] = RunUntilMissing(Overlap::kLayerWise, row_bucket);
    REQUIRE(recordings == 1);
    REQUIRE(got == want);
  }
}

TEST_CASE("ess: what it knows of its misses while steps go on is what it missed") {
  LatentRig::Shape shape;
  shape.drift = 0.1;
  LatentRig rig(shape, SmallPools());
  REQUIRE(rig.policy().Recent().layers.size() == 3);
  REQUIRE(rig.policy().Recent().layers[0].steps == 0);
  REQUIRE(rig.Admit(0, 3, 150, 400));
  rig.EndPrompt(0);
  for (int step = 0; step < 8; ++step) rig.Step({0});
  const PolicyStatistics looked = rig.policy().Statistics();
  for (int step = 0; step < 2; ++step) rig.Step({0});
  const PolicyStatistics recent = rig.policy().Recent();
  for (size_t layer = 0; layer < 3; ++layer) {
    REQUIRE(recent.layers[layer].steps == 8);
    REQUIRE(recent.layers[layer].missing == looked.layers[layer].missing);
    REQUIRE(recent.layers[layer].selected == looked.layers[layer].selected);
  }
}

TEST_CASE("ess: a copy of the host's for each entry changes no bit") {
  PolicyOptions::Ess ess = SmallPools();
  const Result want = Run(ess, 0), naive = Run(ess, 0, "offload-naive");
  ess.probe.row_copies = true;
  for (const Overlap overlap : {Overlap::kNone, Overlap::kDba}) {
    ess.overlap = overlap;
    REQUIRE(Run(ess, 0) == want);
  }
  REQUIRE(Run(ess, 0, "offload-naive") == naive);
}

TEST_CASE("offload-naive fetches everything in every step, to the same results") {
  PolicyOptions::Ess ess = SmallPools();
  const Result want = Run(ess, 0), got = Run(ess, 0, "offload-naive");
  REQUIRE(got.size() == want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    for (size_t r = 0; r < got[i].size(); ++r) {
      REQUIRE(RelativeError(got[i][r], want[i][r]) < 1e-5);
    }
  }
  LatentRig rig({}, ess, "offload-naive");
  REQUIRE(rig.Admit(0, 1, 100, 200));
  rig.EndPrompt(0);
  for (int step = 0; step < 5; ++step) rig.Step({0});
  for (const PolicyStatistics::Layer& layer : rig.policy().Statistics().layers) {
    REQUIRE(layer.steps == 5);
    REQUIRE(layer.selected == 5 * 32);
    REQUIRE(layer.missing == layer.selected);
  }
}

TEST_CASE("ess: places that cannot be divided are refused by the setting's name") {
  const LatentRig::Shape shape;
  LatentRig rig(shape, SmallPools());
  PolicyOptions options = rig.Options();
  const auto refusal = [&] {
    const absl::Status status = CheckEssOptions(options);
    REQUIRE(absl::IsInvalidArgument(status));
    REQUIRE_THAT(std::string(status.message()), Catch::StartsWith("ess_divide_places: "));
    return std::string(status.message());
  };
  const auto remedy = Catch::Contains("sluice-profile --ratios A,B,...");
  REQUIRE(CheckEssOptions(options).ok());
  options.ess = Divided(shape);
  REQUIRE(CheckEssOptions(options).ok());
  options.ess.sparse_memory_ratio = 0;
  REQUIRE_THAT(refusal(), Catch::Contains("ess_sparse_memory_ratio 0 (auto)"));
  options.ess = Divided(shape);
  // One ratio, with two batches; then a second ratio, with another context or without misses.
  options.ess.profile.points.back().ratio = options.ess.profile.points.front().ratio;
  REQUIRE_THAT(refusal(), Catch::Contains("(512), found 1") && remedy);
  options.ess.profile.points.back().ratio = 1;
  REQUIRE_THAT(refusal(), Catch::Contains("found 1") && remedy);
  options.ess.profile.points.back().ratio = 0.9;
  options.ess.profile.points.back().context = 4096;
  REQUIRE_THAT(refusal(), Catch::Contains("found 1") && remedy);
  options.ess.profile.points.clear();
  REQUIRE_THAT(refusal(), Catch::Contains("found 0") && remedy);
  REQUIRE_FALSE(NewPolicy(options).ok());
  options.ess.divide_places = false;
  REQUIRE(CheckEssOptions(options).ok());
  // The mean is the lowest ratio that was profiled: the log says that nothing is divided.
  for (const double ratio : {0.08, 1.0}) {
    options.ess = Divided(shape, ratio);
    options.ess.profile.points.front().ratio = 0.1;
    REQUIRE(CheckEssOptions(options).ok());
    REQUIRE(EssShapeOf(options, shape.layers, shape.block_tokens, 0).shares.empty());
  }
}

// An LRU pool as a list: the oldest stamp goes first, and the lower place among equals.
class NaivePool {
 public:
  explicit NaivePool(int places) : free_(places) {}
  // `next` is a unit that gets a place too, because the next step appends it; -1: none.
  int Use(const std::vector<int32_t>& units, int32_t stamp, int32_t next) {
    int misses = 0;
    std::set<int32_t> selected(units.begin(), units.end());
    std::vector<int32_t> missing;
    for (const int32_t unit : units) {
      if (stamps_.contains(unit)) {
        stamps_[unit].first = stamp;
      } else {
        missing.push_back(unit);
      }
    }
    if (next >= 0) selected.insert(next);
    if (next >= 0 && !stamps_.contains(next)) missing.push_back(next);
    for (const int32_t unit : missing) {
      int place = -1;
      if (used_ < free_) {
        place = used_++;
      } else {
        auto oldest = stamps_.end();
        for (auto it = stamps_.begin(); it != stamps_.end(); ++it) {
          if (selected.contains(it->first)) continue;
          if (oldest == stamps_.end() || it->second < oldest->second) oldest = it;
        }
        place = oldest->second.second;
        stamps_.erase(oldest);
      }
      stamps_[unit] = {unit == next ? next : stamp, place};
      misses += unit == next ? 0 : 1;
    }
    return misses;
  }

 private:
  const int free_;
  int used_ = 0;
  std::map<int32_t, std::pair<int32_t, int>> stamps_;  // (stamp, place)
};

TEST_CASE("ess: misses are those of a naive LRU pool") {
  LatentRig::Shape shape;
  shape.drift = 0.1;
  shape.layers = 2;
  const auto [divided, prefetch] =
      GENERATE(std::pair(false, 0), std::pair(true, 0), std::pair(false, 12));
  PolicyOptions::Ess ess = divided ? Divided(shape) : SmallPools();
  ess.warm_up = false;
  ess.prefetch = prefetch;
  LatentRig rig(shape, ess);
  REQUIRE(rig.Admit(0, 3, 150, 260));
  rig.EndPrompt(0);
  const int64_t even = (std::max(48, 260 / 5) + 15) / 16 * 16;
  const std::vector<int64_t> places = PlacesByLayer(shape, ess, 260);
  REQUIRE((divided ? places[0] < places[1] : places == std::vector<int64_t>(2, even)));
  std::vector<NaivePool> pools;
  for (const int64_t own : places) pools.emplace_back(static_cast<int>(own));
  std::vector<int64_t> want(2, 0), brought(2, 0);
  for (NaivePool& pool : pools) pool.Use({}, 0, 150);
  for (int step = 0; step < 100; ++step) {
    const int position = rig.position(0);
    for (size_t layer = 0; layer < 2; ++layer) {
      const int l = static_cast<int>(layer);
      want[layer] += pools[layer].Use(rig.Selected(3, l, position), position, position + 1);
      brought[layer] += pools[layer].Use(rig.RunnersUp(3, l, position, prefetch), position, -1);
    }
    rig.Step({0});
  }
  const PolicyStatistics statistics = rig.policy().Statistics();
  for (size_t layer = 0; layer < 2; ++layer) {
    REQUIRE(want[layer] > (prefetch > 0 ? 50 : 100));  // there is something to count
    REQUIRE((brought[layer] > 100) == (prefetch > 0));
    REQUIRE(statistics.layers[layer].steps == 100);
    REQUIRE(statistics.layers[layer].selected == 3200);
    REQUIRE(statistics.layers[layer].missing == want[layer]);
    REQUIRE(statistics.layers[layer].recalled == want[layer] + brought[layer]);
  }
}

TEST_CASE("ess: what just missed being selected is there in the next step") {
  LatentRig::Shape shape;
  shape.drift = 0.05;
  const auto missed = [&](int prefetch) {
    PolicyOptions::Ess ess = SmallPools(0.25);
    ess.prefetch = prefetch;
    LatentRig rig(shape, ess);
    REQUIRE(rig.Admit(0, 9, 256, 400));
    rig.EndPrompt(0, rig.Hints(9, 256, 32));
    int64_t sum = 0;
    for (int step = 0; step < 64; ++step) rig.Step({0});
    for (const auto& layer : rig.policy().Statistics().layers) sum += layer.missing;
    return sum;
  };
  const int64_t without = missed(0);
  REQUIRE(without > 64);
  REQUIRE(missed(16) < without * 2 / 3);
}

int64_t Misses(LatentRig& rig, int steps) {
  const PolicyStatistics before = rig.policy().Statistics();
  for (int step = 0; step < steps; ++step) rig.Step({0});
  int64_t sum = 0;
  for (const auto& layer : rig.policy().Statistics().Since(before).layers) sum += layer.missing;
  return sum;
}

TEST_CASE("ess: warmed by hints or by its own last rows, it misses no more than later on") {
  LatentRig::Shape shape;
  shape.drift = 0.03;
  const auto run = [&](bool warm_up, bool computed) {
    PolicyOptions::Ess ess = SmallPools(0.25);
    ess.warm_up = warm_up;
    LatentRig rig(shape, ess);
    REQUIRE(rig.Admit(0, 9, computed ? 224 : 256, 400, 256));
    if (computed) rig.Prompt(0, 32);
    rig.EndPrompt(0, computed || !warm_up ? SelectionHints() : rig.Hints(9, 256, 32));
    const int64_t first = Misses(rig, 16);
    Misses(rig, 16);
    const int64_t steady = Misses(rig, 64) / 4;
    return std::pair(first, steady);
  };
  const auto [hinted, steady] = run(true, false);
  REQUIRE(steady > 16);
  REQUIRE(static_cast<double>(hinted) <= 1.3 * static_cast<double>(steady));
  const auto [computed, then] = run(true, true);
  REQUIRE(static_cast<double>(computed) <= 1.3 * static_cast<double>(then));
  const auto [cold, later] = run(false, false);
  REQUIRE(static_cast<double>(cold) > 1.3 * static_cast<double>(later));
}

TEST_CASE("ess: prompts are computed here too, and a kept sequence has a second turn") {
  LatentRig rig({}, SmallPools());
  REQUIRE(rig.Admit(0, 4, 0, 300, 134));
  for (const int count : {20, 64, 50}) {
    const int first = rig.position(0);
    const Result got = rig.Prompt(0, count);
    for (int r = 0; r < count; r += 7) {
      for (size_t layer = 0; layer < got.size(); ++layer) {
        REQUIRE(RelativeError(got[layer][static_cast<size_t>(r)],
                              rig.Naive(4, static_cast<int>(layer), first + r)) < 1e-5);
      }
    }
  }
  rig.EndPrompt(0);
  for (int step = 0; step < 20; ++step) {
    const int at = rig.position(0);
    CheckRows(rig, rig.Step({0}), {4}, {at});
  }
  // The sequence is kept: its index keys go back to DRAM.
  const int length = rig.position(0);
  REQUIRE(rig.policy().ReserveHostCopy(0, length, {}));
  rig.policy().Evict(0, length);
  rig.AwaitWarm(0);
  std::unique_ptr<SequenceCache> home = rig.policy().DetachHostCache(0);
  REQUIRE(rig.hbm().UsageOf(0).used_bytes == 0);
  rig.Readmit(1, 4, length, 350, length + 10, std::move(home));
  rig.Prompt(1, 10);
  rig.EndPrompt(1);
  for (int step = 0; step < 20; ++step) {
    const int at = rig.position(1);
    CheckRows(rig, rig.Step({1}), {4}, {at});
  }
}

TEST_CASE("ess: how a prompt was cut into chunks changes no bit of what follows") {
  const auto run = [](const std::vector<int>& chunks) {
    LatentRig rig({}, SmallPools());
    REQUIRE(rig.Admit(0, 4, 0, 300, 120));
    for (const int count : chunks) rig.Prompt(0, count);
    rig.EndPrompt(0);
    Result all;
    for (int step = 0; step < 30; ++step) {
      const Result got = rig.Step({0});
      all.insert(all.end(), got.begin(), got.end());
    }
    return all;
  };
  const Result want = run({64, 56});
  for (const std::vector<int>& chunks :
       {std::vector<int>{60, 60}, {40, 40, 40}, {64, 30, 20, 5, 1}}) {
    REQUIRE(run(chunks) == want);
  }
}

TEST_CASE("ess: prompts and decode rows share a step") {
  LatentRig rig({}, SmallPools());
  REQUIRE(rig.Admit(0, 4, 120, 300));
  rig.EndPrompt(0);
  rig.Step({0});
  REQUIRE(rig.Admit(1, 6, 100, 300, 102));
  // The other's prompt goes on while this one generates.
  const std::vector<int> at = {rig.position(0), rig.position(1), rig.position(1) + 1};
  const Result got = rig.Mixed({0}, 1, 2);
  CheckRows(rig, got, {4, 6, 6}, at);
  rig.EndPrompt(1);
  for (int step = 0; step < 10; ++step) {
    const std::vector<int> now = {rig.position(0), rig.position(1)};
    CheckRows(rig, rig.Step({0, 1}), {4, 6}, now);
  }
}

TEST_CASE("ess: HBM is counted for the whole length, and index keys leave DRAM") {
  LatentRig::Shape shape;
  shape.pool_bytes = size_t{2} << 20;
  LatentRig rig(shape, SmallPools());
  int admitted = 0;
  while (admitted < 3 && rig.Admit(admitted, 1, 64, 400)) ++admitted;
  REQUIRE(admitted >= 1);
  for (int slot = 0; slot < admitted; ++slot) rig.AwaitWarm(slot);
  const PagePool::Usage index = rig.dram().UsageOf(1);
  REQUIRE(index.used_bytes == 0);
  REQUIRE(index.reserved_bytes == 0);
  const int64_t latents = rig.dram().UsageOf(0).used_bytes;
  REQUIRE(latents >= int64_t{admitted} * 3 * 400 * 48 * 4);
  for (int slot = 0; slot < admitted; ++slot) rig.policy().Release(slot);
  REQUIRE(rig.dram().UsageOf(0).used_bytes == 0);
  for (size_t kind = 0; kind < 3; ++kind) REQUIRE(rig.hbm().UsageOf(kind).used_bytes == 0);
}

TEST_CASE("ess: a slot's next sequence sees nothing of the one before") {
  LatentRig rig({}, SmallPools());
  for (const uint64_t seed : {11, 12, 13}) {
    REQUIRE(rig.Admit(0, seed, 90, 200));
    rig.EndPrompt(0, rig.Hints(seed == 11 ? 11 : 12, 90, 4));  // another's hints: harmless
    for (int step = 0; step < 8; ++step) {
      const int at = rig.position(0);
      CheckRows(rig, rig.Step({0}), {seed}, {at});
    }
    rig.policy().Release(0);
  }
}

}  // namespace
}  // namespace sluice
