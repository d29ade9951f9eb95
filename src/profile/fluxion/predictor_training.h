// Trains the predictor of policy fluxion by samples of heads: 41 features of a head, the least
// budgets with which its attention stays within tau, and whether it needs any budget at all.
#pragma once

#include <array>
#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/attention/policies/fluxion/predictor.h"

namespace sluice {

struct FluxionSample {
  std::array<float, kernels::kFluxionFeatures> features;
  std::array<float, 5> budgets;  // the least shares, 0 to 1, at blocks of 1, 16, 32, 64 and 128
  bool streaming;
  int32_t document;
};

struct PredictorTrainingOptions {
  FluxionPredictor::Form form = FluxionPredictor::Form::kFour;
  double quantile = 0.75;  // of the pinball loss: the share of heads whose budget is to suffice
  int epochs = 8;
  int batch = 256;
  double rate = 1e-3;              // Adam's at the start; it falls to 0 along a cosine
  double false_streaming = 0.085;  // the most of the heads that need a budget that may stream
  uint64_t seed = 1;               // of the weights at the start, and of the order of samples
  double tau = 0.1;                // of the samples; the predictor takes it along
};

struct PredictorTraining {
  FluxionPredictor predictor;  // without a fingerprint, which the caller fills in
  // Losses of the best epoch. That of training is the mean over the epoch, while the weights
  // change.
  double training_loss = 0, validation_loss = 0;
  // Shares of validation's samples: streaming is told rightly, and heads that need a budget stream.
  double streaming_accuracy = 0, false_streaming = 0;
  int best_epoch = 0;  // from 1
};

// Trains by four of five documents and keeps the weights of the epoch that is best for the fifth.
// The loss is the pinball loss of budgets, over the samples that do not stream, and the cross
// entropy of streaming, over all. The same samples, options and build give the same predictor.
// `progress(done, all)` gets numbers of epochs. INVALID_ARGUMENT: an option or a sample is out of
// range, or the samples are too few to train and to validate by; the message names the remedy.
absl::StatusOr<PredictorTraining> TrainFluxionPredictor(
    absl::Span<const FluxionSample> samples, const PredictorTrainingOptions& options,
    const std::function<void(int64_t, int64_t)>& progress);

}  // namespace sluice
