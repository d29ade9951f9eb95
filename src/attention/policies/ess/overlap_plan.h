// The overlap schedule (schedule.h) of each layer, by the number of decode rows in a step. It is
// chosen by the misses that are expected of the layers: first those of a profile, then those that
// are observed. One thread calls it, except statistics().
//
// Observations come some steps apart and move an average. The plan of a step size changes only when
// the schedules that are best by that average would shorten the step by more than a change costs: a
// step that changed is recorded again, which takes the host tens of milliseconds, and a plan that
// followed every observation would never finish recording.
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
    int max_rows = 0;  // Maximum decode rows in a step.
    PolicyOptions::Ess::Overlap overlap = PolicyOptions::Ess::Overlap::kLayerWise;
    bool prefetch = false;  // True: layers may fetch for the next step.
    StageRates rates;
    MissProfile profile;
    double selected = 0;  // Most entries that a row attends to.
    // Loads expected before anything is observed: sequences of `context` tokens, with places for
    // the share `ratio` of them. At 1 everything has a place and nothing is missed.
    int64_t context = 0;
    double ratio = 0;
  };
  explicit OverlapPlan(const Options& options);

  // Returns the schedule of each layer for steps of `rows` decode rows. It is chosen at the first
  // call and stays until Change. REQUIRES: 0 < rows <= max_rows.
  absl::Span<const Overlap> Of(int rows);

  // Returns whether the layer fetches for the next step. With a profile, a layer does so if its
  // transfer would outlast its attention in steps of max_rows. This is settled when the plan is
  // made: whether an entry has a place decides in which of two lists attention finds it, and so
  // decides the bits of a sequence's results, which must depend neither on its neighbours nor on
  // the moment.
  bool Prefetches(int layer) const { return prefetch_[static_cast<size_t>(layer)]; }

  // Returns whether observations would change anything, i.e. the choice is layer-wise.
  bool adapts() const { return options_.overlap == PolicyOptions::Ess::Overlap::kLayerWise; }
  // Takes an observation: the policy's sums since it was made, and the mean tokens of the sequences
  // that run now.
  void Observe(const PolicyStatistics& sums, double context);
  // Called before each step, with its number of decode rows (0: none). Returns true if the best
  // schedules for such steps are clearly better than the current ones; it has then adopted them.
  bool Change(int rows);

  // The mean gain per layer that a change must bring. Recording a layer again takes the host about
  // half a millisecond, which must be earned back while the plan is held.
  static constexpr double kLeastGainUs = 1.5;
  // Observations before the first change: pools fill and averages settle.
  static constexpr int kSettleLooks = 4;
  // Observations from one change of a step size's plan to its next.
  static constexpr int kHoldLooks = 16;
  static constexpr double kWeight = 0.5;    // Weight of the newest observation in the average.
  static constexpr int64_t kLeastRows = 8;  // Decode rows that an observation must have seen.

  // Returns how much longer a step of `rows` rows takes under these schedules than without any
  // transfer, by what is expected now, in microseconds.
  double AddedTimeOf(absl::Span<const Overlap> schedules, int rows) const;

  // Any thread may call it at any time.
  ScheduleStatistics statistics() const;

 private:
  struct Plan {
    std::vector<Overlap> layers;
    bool chosen = false;
    int64_t judged = 0;   // The observation by which it was last judged.
    int64_t changed = 0;  // The observation of its last change.
  };
  StageTimes TimesOfLayer(size_t layer, int rows) const;
  void Choose(int rows, std::vector<Overlap>* layers) const;
  void Publish(int rows);

  const Options options_;
  std::vector<Plan> plans_;  // Indexed by rows.
  std::vector<Overlap> best_;
  std::vector<bool> prefetch_;  // Indexed by layer.
  bool seen_ = false;           // True once anything has been observed.
  int64_t looks_ = 0;
  int shown_ = 0;               // The rows whose schedules statistics() reports.
  double context_;              // Mean tokens in the newest observation.
  std::vector<double> misses_;  // The average by layer; empty until something is observed.
  std::vector<PolicyStatistics::Layer> last_;
  std::array<std::atomic<int>, ScheduleStatistics::kSchedules> counts_{};
  std::atomic<int64_t> changes_{0};
};

// Returns a text such as "none 0-2, da 3-58 60, dba 59".
std::string LayersBySchedule(absl::Span<const Overlap> schedules);

}  // namespace sluice
