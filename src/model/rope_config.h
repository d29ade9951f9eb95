// Reads RoPE settings from a config.json, in either spelling. Internal to src/model.
#pragma once

#include "absl/status/statusor.h"
#include "src/base/config_reader.h"
#include "src/model/rope.h"

namespace sluice {

// Reads `rope_parameters` (new) or `rope_theta` with `rope_scaling` (old), with the fallbacks of
// transformers 5.23. If a config has both spellings, they must say the same.
absl::StatusOr<RopeConfig> ReadRopeConfig(const ConfigReader& config,
                                          int64_t max_position_embeddings);

}  // namespace sluice
