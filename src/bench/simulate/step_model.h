// The time of a decode step of a DeepSeek-V3.2 rank, as the sum of its operators' measured times
// (operator_times.h) in the order in which src/model/latent_model.cc and the policies enqueue them.
// Operators on parallel branches count as the longest branch and a fork and a join. Every result is
// a forecast.
//
// The schedules of policy ess and what they hide come from policies/ess/schedule.h: this file only
// fills in the stages' times. Two things are added that the engine's choice does not know: a
// transfer beneath attention keeps a share of its speed (constant beside_attention), and it waits
// for an address translation for each 64 KiB of a sequence's home that it touches (translation_us).
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/policies/ess/schedule.h"
#include "src/bench/simulate/operator_times.h"
#include "src/model/model_config.h"

namespace sluice::bench {

// Expert parallelism: what the ranks exchange, which is not measured here and must be stated.
struct ExpertParallel {
  // Dispatch and combine of a layer with experts, together: a fixed part and a part for each row.
  double all_to_all_us = 0;
  double all_to_all_row_us = 0;
  // Two halves of the batch take turns: one computes while the other's rows are exchanged.
  bool two_batch = false;
};

struct StepShape {
  int sequences = 1;
  int drafts = 0;  // Drafts that a step verifies for each sequence, one row each.
  int64_t context = 0;

  bool ess = false;  // False: policy full.
  // Policy ess: entries that a sequence misses in a step, by layer (in turn, if there are fewer
  // than layers), and the places of a sequence in a layer.
  std::vector<double> misses;
  int64_t places = 0;
  bool whole = false;               // Every sequence has a place for each of its tokens.
  bool skip_transfers = false;      // As --policies ess:skip=1 of sluice-bench policies.
  std::optional<Overlap> schedule;  // One schedule for all layers; none: the engine's choice.
  double link_bytes_per_s = 0;      // Most that the link brings; 0: as measured.

  ExpertParallel parallel;

  int rows() const { return sequences * (1 + drafts); }
};

struct StepForecast {
  double us = 0;
  // Microseconds by part of the step; their sum is `us`.
  std::map<std::string, double> parts;
  std::array<int, 3> schedules{};  // Layers with each value of Overlap.
  double transfer_us = 0;          // All transfers, if nothing hid them.
  double link_bytes = 0;
  std::set<std::string> extrapolated;  // Operators outside their measured range.

  // Returns the name of the part that takes most.
  std::string longest() const;
};

// Returns the tokens that a step of a sequence gives on average: the drafts that are accepted
// before the first refusal, each with probability `acceptance` on its own, and one more.
double TokensOfStep(int drafts, double acceptance);

// Returns how many of `experts` are chosen by at least one of `rows` rows that choose `k` each,
// uniformly and each for itself.
double ExpertsRead(int experts, int k, double rows);

// INVALID_ARGUMENT: the shape cannot be simulated. Errors of TimeLookup. REQUIRES: times'
// CheckGeometry(config) is OK.
absl::StatusOr<StepForecast> SimulateStep(const ModelConfig& config, const OperatorTimes& times,
                                          bool extrapolate, const StepShape& shape);

}  // namespace sluice::bench
