// Tests how the number of drafts follows what steps give and cost, on steps of made-up times.
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "src/base/rng.h"
#include "src/engine/draft_limit.h"

namespace sluice {
namespace {

// Steps of so many sequences, whose time is `fixed` for the step and `row` for each of its rows.
struct Machine {
  int sequences;
  double fixed, row;
  double acceptance;

  double Rate(int limit) const {
    double tokens = 1, all = 1;
    for (int i = 0; i < limit; ++i) tokens += all *= acceptance;
    return sequences * tokens / (fixed + row * sequences * (1 + limit));
  }
  int Best(int most) const {
    int best = 0;
    for (int k = 1; k <= most; ++k) best = Rate(k) > Rate(best) ? k : best;
    return best;
  }
};

// Runs steps; returns their tokens over their time.
double Run(const Machine& machine, DraftLimit& limit, int steps, SplitMix64& random) {
  double tokens = 0, time = 0;
  for (int s = 0; s < steps; ++s) {
    const int drafts = limit.Of(machine.sequences);
    std::vector<int> accepted(static_cast<size_t>(drafts) + 1, 0);
    for (int i = 0; i < machine.sequences; ++i) {
      for (size_t d = 0; d < static_cast<size_t>(drafts); ++d) {
        if (static_cast<double>(random.Below(1000)) >= 1000 * machine.acceptance) break;
        ++accepted[d];
        ++tokens;
      }
      ++tokens;
    }
    const double noise = 1 + 0.02 * (static_cast<double>(random.Below(1000)) / 1000 - 0.5);
    // One step of 20 takes long for reasons of its own.
    const double took = (machine.fixed + machine.row * machine.sequences * (1 + drafts)) * noise *
                        (random.Below(20) == 0 ? 3 : 1);
    time += took;
    limit.Note(machine.sequences, drafts, machine.sequences, accepted, absl::Milliseconds(took));
  }
  return tokens / time;
}

TEST_CASE("the limit of drafts comes near the best one and stays there") {
  SplitMix64 random(7);
  const Machine machines[] = {
      {1, 5.6, 0.2, 0.7},   // rows are nearly free
      {24, 16, 0.1, 0.7},   // as Llama-3-8B's on an H200
      {76, 10, 0.5, 0.7},   // rows are dear, as DeepSeek-V3.2's under ess
      {60, 12, 0.27, 0.7},  // between both
      {8, 14, 0.3, 0.1},    // drafts are seldom right
      {200, 0, 1.0, 0.9},   // nothing but rows
  };
  for (const Machine& machine : machines) {
    DraftLimit limit(3);
    REQUIRE(limit.Of(machine.sequences) == 3);
    Run(machine, limit, 1000, random);
    const double best = machine.Rate(machine.Best(3));
    CAPTURE(machine.sequences, machine.Best(3), limit.Of(machine.sequences));
    // Trials and a limit within kLeastGain of the best one cost no more than this together; one
    // step in 20 takes three times as long.
    CHECK(Run(machine, limit, 4000, random) * 1.1 > 0.93 * best);
    // The check can fail where the first limit is far off.
    if (machine.sequences == 200) CHECK(machine.Rate(3) < 0.9 * best);
  }
}

TEST_CASE("the limit follows a change, and knows batches of other sizes apart") {
  SplitMix64 random(9);
  DraftLimit limit(3);
  const Machine dear = {64, 0.1, 1.0, 0.3}, cheap = {2, 10, 0.01, 0.8};
  Run(dear, limit, 1500, random);
  Run(cheap, limit, 300, random);
  CHECK(limit.Of(64) <= 1);
  CHECK(limit.Of(2) >= 2);
  CHECK(limit.Of(500) == 3);  // not seen yet
  // The machine changes: rows are free now.
  Run({64, 10, 0.0001, 0.9}, limit, 12000, random);
  CHECK(limit.Of(64) >= 2);
}

TEST_CASE("a step that another limit launched is not taken for a trial's") {
  DraftLimit limit(2);
  const std::array<int, 2> none = {0, 0};
  for (int i = 0; i < DraftLimit::kLeastWait; ++i)
    limit.Note(4, 2, 4, none, absl::Milliseconds(10));
  REQUIRE(limit.Of(4) == 1);  // the trial
  for (int i = 0; i < 100; ++i) limit.Note(4, 2, 4, none, absl::Milliseconds(1));
  CHECK(limit.Of(4) == 1);
  // Had the steps of 1 ms counted, two drafts would look best.
  for (int i = 0; i < DraftLimit::kTrialSteps; ++i)
    limit.Note(4, 1, 4, none, absl::Milliseconds(8));
  CHECK(limit.Of(4) <= 1);
}

TEST_CASE("sequences without a row in a step do not change whose trial it is") {
  DraftLimit limit(2);
  const std::array<int, 2> half = {1, 0};
  for (int i = 0; i < DraftLimit::kLeastWait; ++i) {
    limit.Note(8, 2, 2, half, absl::Milliseconds(10));
  }
  CHECK(limit.Of(8) == 1);  // its trial, though two of eight had rows
  CHECK(limit.Of(2) == 2);
}

TEST_CASE("without drafts there is nothing to choose") {
  DraftLimit limit(0);
  for (int i = 0; i < 200; ++i) limit.Note(3, 0, 3, {}, absl::Milliseconds(1));
  CHECK(limit.Of(3) == 0);
}

}  // namespace
}  // namespace sluice
