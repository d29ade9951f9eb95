// Figures 3, 4, 10b and 11 of Fluxion's paper (arXiv 2605.07719), measured on rows of documents:
// what a share of the scores is worth, how little the sink's values weigh, how unlike heads are in
// what they contribute, how normal q k is, and what tau costs.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "src/profile/fluxion/document_rows.h"
#include "src/profile/fluxion/head_figure.h"
#include "src/profile/fluxion/predictor_check.h"
#include "src/profile/fluxion/tau_quality.h"

namespace sluice {

// Values of tau in figure 10b.
inline constexpr std::array<double, 10> kTaus = {0.02, 0.04, 0.06, 0.08, 0.1,
                                                 0.12, 0.14, 0.16, 0.18, 0.2};
// The budget that figure 10b compares with: (16, 0.05).
inline constexpr double kFixedShare = 0.05;

class FluxionFigures {
 public:
  FluxionFigures();
  void Add(const LayerRow& row);  // any thread

  // The ways to budget of figure 10b: the fixed one, then the oracle at each of kTaus.
  const std::vector<BudgetSource>& sources() const { return taus_.sources(); }
  // Takes what came of these sources, which is part of figure 10b from then on.
  void SetQuality(std::vector<SourceQuality> quality) { quality_ = std::move(quality); }

  // Returns the figures as tools/sluice plot-fluxion reads them; `tau` is that of the rows.
  // Outputs, histograms and Q-Q plots are those of two layers, the first and the one at 5/8 of the
  // depth (the paper's layers 0 and 20 of 32), at the head and row whose largest gap is the median
  // of the layer's.
  nlohmann::json Json(const std::string& model_fingerprint, double tau) const;
  std::string Text() const;  // the key numbers, for people

 private:
  std::vector<HeadFigure> Sorted() const;  // in an order that threads do not change

  mutable std::mutex mutex_;
  std::vector<HeadFigure> heads_;
  std::map<int64_t, ValueLengths> values_;  // by layer
  PredictorCheck taus_;
  std::vector<SourceQuality> quality_;  // empty: it was not measured
};

}  // namespace sluice
