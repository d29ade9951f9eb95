// DeepSeek-V3 and V3.2: decoder layers with multi-head latent attention and experts.
#pragma once

#include <memory>
#include <string>

#include "src/model/model.h"
#include "src/model/weight_source.h"

namespace sluice {

// Makes the model. Takes the weights out of `source` into the form of the device's kernels. Returns
// UNIMPLEMENTED if those kernels lack latent attention.
absl::StatusOr<std::unique_ptr<Model>> NewLatentModel(const Model::Options& options,
                                                      const ModelConfig& config,
                                                      std::string fingerprint,
                                                      std::unique_ptr<WeightSource> source,
                                                      Device* device);

}  // namespace sluice
