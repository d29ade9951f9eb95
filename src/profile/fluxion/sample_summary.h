// This file sums up what samples of heads say of a model: how the budget grows with the size of
// block, how well the line of equation 1 follows it (Fluxion, figure 5 and section 5.2), and which
// heads stream.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/attention/policies/fluxion/predictor.h"
#include "src/profile/fluxion/predictor_training.h"
#include "src/profile/fluxion/sample_file.h"

namespace sluice {

// Tokens of the blocks that a sample has budgets at.
inline constexpr std::array<int32_t, 5> kSampleBlocks = {1, 16, 32, 64, 128};
// A budget at each of them, as a share of the cpu segment.
using BlockBudgets = std::array<double, kSampleBlocks.size()>;

// The budget at blocks of b tokens as at_one + slope * log2(b).
struct BudgetLine {
  double at_one = 0, slope = 0;
  // 1 - (squared errors) / (squared distances from the mean) over the five sizes of block. It is
  // not a number where all budgets are equal, and below 0 where the mean would be nearer.
  double r2 = 0;
};
// Returns the line of least squares.
BudgetLine FitBudgetLine(const BlockBudgets& budgets);
// Returns the line of least squares among those through the budget of single tokens, which is the
// paper's bgt0.
BudgetLine PinBudgetLine(const BlockBudgets& budgets);

// How well lines follow budgets, over the samples that do not stream and have a line with an R2.
struct LineSummary {
  int64_t samples = 0;
  std::vector<double> percentiles;  // of R2: the 0th, 5th, 10th and so on up to the 100th
  double good = 0;                  // share of the samples whose R2 is kGoodLine or more
};
inline constexpr double kGoodLine = 0.9;

struct HeadSummary {
  int64_t layer = 0, head = 0;
  int64_t samples = 0, streaming = 0;
  int64_t told = 0,
          right = 0;  // samples of which the predictor says that they stream; rightly told
  // Medians over the samples that do not stream, and their fitted line; unspecified without such.
  BlockBudgets budgets = {};
  BudgetLine line;
};

struct SampleSummary {
  std::string model_fingerprint;
  double tau = 0;
  int64_t documents = 0, samples = 0, streaming = 0;
  bool predicted = false;  // whether there is a predictor
  int64_t told = 0, right = 0;
  // Over the samples that do not stream: quartiles of the budget at each size of block.
  BlockBudgets first = {}, median = {}, third = {};
  LineSummary fitted, pinned;
  std::vector<HeadSummary> heads;  // by layer, then by query head

  int64_t retrieval() const { return samples - streaming; }
};

// Summarises samples, and what `predictor` says of them, which may be null. Percentiles are values
// of samples, at the nearest rank. INVALID_ARGUMENT: there is no sample, or one is out of range.
// FAILED_PRECONDITION: the predictor is of another model.
absl::StatusOr<SampleSummary> SummarizeSamples(const FluxionSamples& samples,
                                               const FluxionPredictor* predictor);

// Returns the summary as tools/sluice plot-fluxion reads it. Where there is no predictor, what it
// would have told is null.
nlohmann::json SummaryJson(const SampleSummary& summary);
// Returns the summary without its heads, for people.
std::string SummaryText(const SampleSummary& summary);

}  // namespace sluice
