// Which schedule each layer has (schedule.h), by how many decode rows a step has: chosen by what
// the layers are expected to miss, first by a profile's word, then by what is seen. One thread, but
// for statistics().
//
// What is seen comes in looks, some steps apart, and moves an average. The plan of a step size
// changes when the schedules that are best by that average would shorten the step by more than a
// change is worth: a step that changed is recorded again, which takes the host tens of
// milliseconds, and a plan that follows every look would never be done with that.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "src/attention/policies/ess/schedule.h"
#include "src/attention/policy_options.h"
#include "src/attention/policy_statistics.h"

namespace sluice {

class OverlapPlan {
 public:
  struct Options {
    int layers = 0;
    int max_rows = 0;  // decode rows of a step
    PolicyOptions::Ess::Overlap overlap = PolicyOptions::Ess::Overlap::kLayerWise;
    bool prefetch = false;  // layers may fetch for the next step
    StageRates rates;
    MissProfile profile;
    double selected = 0;  // entries that a row attends to at most
    // What is expected before anything is seen: sequences of so many tokens, with places for this
    // share of them; 1: everything has a place, and nothing is missed.
    int64_t context = 0;
    double ratio = 0;
  };
  explicit OverlapPlan(const Options& options);

  // By layer, for steps of `rows` decode rows; chosen when first asked for, then until Change.
  // REQUIRES: 0 < rows <= max_rows.
  absl::Span<const Overlap> Of(int rows);

  // Whether the layer fetches for the next step: where a profile says so, if its transfer would
  // outlast attention in steps of max_rows. Settled when the plan is made: what has a place decides
  // in which of two lists attention finds an entry, so a sequence's bits, which no neighbour and no
  // moment may change.
  bool Prefetches(int layer) const { return prefetch_[static_cast<size_t>(layer)]; }

  // Whether looks would change anything: the choice is layer-wise.
  bool adapts() const { return options_.overlap == PolicyOptions::Ess::Overlap::kLayerWise; }
  // A look: the policy's sums since it was made, of sequences of `context` tokens now.
  void Observe(const PolicyStatistics& sums, double context);
  // Before each step, whose decode rows are `rows` (0: none): whether the best schedules for such
  // steps are clearly better than those that they have; then they have them from now on.
  bool Change(int rows);

  // A layer's change must shorten the step by so much, on average: recording a layer again takes
  // the host about half a millisecond, and must be earned within the looks that the plan is held.
  static constexpr double kLeastGainUs = 1.5;
  static constexpr int kSettleLooks = 4;    // before the first change: pools fill, averages settle
  static constexpr int kHoldLooks = 16;     // from one change of a step size to its next
  static constexpr double kWeight = 0.5;    // of the newest look in the average
  static constexpr int64_t kLeastRows = 8;  // decode rows that a look must have seen

  // How much longer than without any transfer a step of `rows` rows is under these schedules, by
  // what is expected now, in microseconds.
  double AddedTimeOf(absl::Span<const Overlap> schedules, int rows) const;

  // Any thread, at any time.
  ScheduleStatistics statistics() const;

 private:
  struct Plan {
    std::vector<Overlap> layers;
    bool chosen = false;
    int64_t judged = 0;   // the look by which it was judged last
    int64_t changed = 0;  // the look of its last change
  };
  StageTimes TimesOfLayer(size_t layer, int rows) const;
  void Choose(int rows, std::vector<Overlap>* layers) const;
  void Publish(int rows);

  const Options options_;
  std::vector<Plan> plans_;  // by rows
  std::vector<Overlap> best_;
  std::vector<bool> prefetch_;  // by layer
  bool seen_ = false;           // anything at all
  int64_t looks_ = 0;
  int shown_ = 0;               // the rows whose schedules statistics() has
  double context_;              // of the newest look
  std::vector<double> misses_;  // by layer: the average; empty until something is seen
  std::vector<PolicyStatistics::Layer> last_;
  std::array<std::atomic<int>, ScheduleStatistics::kSchedules> counts_{};
  std::atomic<int64_t> changes_{0};
};

// "none 0-2, da 3-58 60, dba 59".
std::string LayersBySchedule(absl::Span<const Overlap> schedules);

}  // namespace sluice
