// The measurements of one query head at one row, and of a KV head's values, that the figures of
// Fluxion's paper are made of.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "src/profile/fluxion/document_rows.h"
#include "src/profile/fluxion/normality.h"

namespace sluice {

// Shares of a row's scores that a head keeps in figure 3a, and the relative error that is large.
inline constexpr std::array<double, 4> kKeptScores = {0.8, 0.9, 0.95, 0.99};
inline constexpr double kLargeError = 0.2;
// The deviation from a head's own output that figure 4 allows.
inline constexpr double kOwnDeviation = 0.1;
// One query head at one row.
struct HeadFigure {
  int64_t layer = 0, head = 0, position = 0;
  int32_t document = 0;
  // Figure 3a, by kKeptScores: |o' - o| / |o|, and the tokens kept as a share of those to choose
  // from. `all` chooses among all tokens, `beside` among those beside the default set.
  struct Kept {
    std::array<double, kKeptScores.size()> errors = {}, tokens = {};
  };
  Kept all, beside;
  double sink_score = 0;       // share of the scores, figure 3c
  double relative_length = 0;  // |o| as a share of the layer's largest
  // Least budgets in blocks of 16 (shares of the cpu segment): for an error of kOwnDeviation of |o|
  // (figure 4), and of tau of the layer's largest |o| (equation 2).
  double own_budget = 0, budget = 0;
  std::vector<float> o;  // [head_dim]
  Normality z;           // of q k / (|q| sqrt(head_dim)) over the cpu segment, figure 11
  // How far the log-sum-exp of the cpu segment's scores is from that of normal ones of the same
  // mean and variance.
  double lse_error = 0;
};
// Measures query head `head` of the row. REQUIRES: the row has a cpu segment.
HeadFigure MeasureHeadFigure(const LayerRow& row, size_t head);

// Mean lengths of values: of the first token, of tokens of the sink with it, and of all others.
struct ValueLengths {
  double first = 0, sink = 0, others = 0;
  int64_t first_tokens = 0, sink_tokens = 0,
          other_tokens = 0;  // that the means are of; those of each row count

  void Add(const GroupAttention& group);
};

}  // namespace sluice
