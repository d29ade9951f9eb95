// A predictor for policy fluxion that no model trained, for timing models whose weights are by
// formula. It has the shape and so the cost of a real one. Its answers differ from head to head as
// those of a real one do, and from row to row a little; they know nothing of the model's attention.
#pragma once

#include <cstdint>
#include <memory>

#include "src/attention/policies/fluxion/predictor.h"

namespace sluice::bench {

struct SyntheticPredictorOptions {
  int layers = 0;
  int heads = 0;
  int kv_heads = 0;
  int64_t tokens = 0;      // of a sequence
  double streaming = 0.6;  // share of the heads that stream
  // How many times smaller the volume (equation 3) is than that of blocks of 16 of which every head
  // reads `fixed_share`.
  double smaller = 3.1;
  double fixed_share = 0.05;
  uint64_t seed = 1;
};

std::shared_ptr<const FluxionPredictor> SyntheticPredictor(
    const SyntheticPredictorOptions& options);

// Returns the mean volume of a list, in tokens, if the predictor's heads are as far from their
// anchor as most are. A negative `fixed_share` asks the predictor, any other is every head's, in
// blocks of 16.
double SyntheticVolume(const FluxionPredictor& predictor, const SyntheticPredictorOptions& options,
                       double fixed_share = -1);

// Return the predictor with a part of it taken away, for ablations. Both keep the budgets of heads
// that read.
//
// No head streams: those that would read what their own budgets say. These are drawn like everyone
// else's, while a real head that streams would need little.
std::shared_ptr<const FluxionPredictor> WithoutStreaming(const FluxionPredictor& predictor);
// Every list has this level: at all others a head's budget is everything, so that the plan takes
// none of them. REQUIRES: the form is kFour.
std::shared_ptr<const FluxionPredictor> AtOneLevel(const FluxionPredictor& predictor, int level);

}  // namespace sluice::bench
