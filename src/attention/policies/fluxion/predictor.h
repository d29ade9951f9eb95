// The predictor of policy fluxion: a small network that tells from 41 numbers of a head how much of
// the KV cache on the CPU the head needs at each size of block, and whether it needs any of it. It
// lies in a file of its own, which sluice-profile writes and a server reads. Any thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/fluxion_params.h"

namespace sluice {

struct FluxionPredictor {
  // kLine: the outputs are bgt0, k and the logit of streaming, and the budget at blocks of b tokens
  // is bgt0 + k log2(b) (Fluxion, equation 1). kFour: the outputs are log2 of the budgets at the
  // four sizes of block, then the logit of streaming.
  enum class Form { kLine, kFour };

  std::string model_fingerprint;  // 64 hexadecimal digits
  Form form = Form::kFour;
  double tau = 0;                 // the error of attention that the budgets were measured at
  float streaming_threshold = 1;  // a head streams where sigmoid(logit) is above it

  // [kernels::kFluxionFeatures], of the training set. A feature that is the same everywhere has
  // deviation 1.
  std::vector<float> mean, deviation;

  struct Layer {
    int in = 0, out = 0;
    std::vector<float> weights;  // [out][in]
    std::vector<float> bias;     // [out]
  };
  std::vector<Layer> layers;  // GELU (the form with erf) is between them

  struct Head {
    std::array<float, 4> budgets;  // shares of the tokens on the CPU, 0 to 1, at kFluxionLevels
    bool streaming;
  };
  // Predicts for the head with these kernels::kFluxionFeatures features. A budget that is not
  // finite becomes 1, as reading too much is slow but right, and then the head does not stream. If
  // a feature is not finite, all budgets are 1. REQUIRES: ValidFluxionPredictor(*this).
  Head Predict(absl::Span<const float> features) const;

  // Returns the outputs of the network, in float32 with the terms of each sum in order.
  std::vector<float> Outputs(absl::Span<const float> features) const;

  int64_t parameters() const;
};

// Returns the number of the network's outputs.
int FluxionOutputs(FluxionPredictor::Form form);

// Returns the share of a logit, as Predict compares it with streaming_threshold.
float FluxionSigmoid(float logit);

// INVALID_ARGUMENT: the shapes do not fit each other, or a number is not finite or out of range.
// The message begins with `what`.
absl::Status ValidFluxionPredictor(const FluxionPredictor& predictor, const std::string& what);

// Writes the file under another name first, so that a reader never sees a part of it.
// INVALID_ARGUMENT: the predictor is not valid, or the file cannot be written.
absl::Status WriteFluxionPredictor(const FluxionPredictor& predictor, const std::string& path);

// NOT_FOUND: there is no such file. INVALID_ARGUMENT: the file is not a predictor, has another
// version of the format or a value out of range, or is damaged. The message names the file, the key
// and the remedy.
absl::StatusOr<FluxionPredictor> ReadFluxionPredictor(const std::string& path);

// FAILED_PRECONDITION: the predictor was trained for another model.
absl::Status CheckFluxionPredictor(const FluxionPredictor& predictor,
                                   const std::string& model_fingerprint);

// Reads the file and checks that its predictor is for this model; an empty fingerprint is any
// model. Errors are those of ReadFluxionPredictor and CheckFluxionPredictor.
absl::StatusOr<std::shared_ptr<const FluxionPredictor>> LoadFluxionPredictor(
    const std::string& path, const std::string& model_fingerprint);

}  // namespace sluice
