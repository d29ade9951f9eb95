// Files of samples, which `sluice-profile fluxion collect` writes and `train` reads.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/profile/fluxion/predictor_training.h"

namespace sluice {

struct FluxionSamples {
  std::string model_fingerprint;
  double tau = 0;
  std::vector<FluxionSample> samples;
};

// INVALID_ARGUMENT: the file cannot be written.
absl::Status WriteFluxionSamples(const FluxionSamples& samples, const std::string& path);
// NOT_FOUND: there is no such file. INVALID_ARGUMENT: it is not a file of samples, or is damaged.
absl::StatusOr<FluxionSamples> ReadFluxionSamples(const std::string& path);

}  // namespace sluice
