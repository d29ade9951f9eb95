// Reads the DeepSeek-V3 family's settings from a config.json. Internal to src/model.
#pragma once

#include "absl/status/statusor.h"
#include "src/base/config_reader.h"
#include "src/model/latent_config.h"
#include "src/model/rope.h"

namespace sluice {

struct LatentFamily {
  bool has_indexer;        // DeepSeek-V3.2
  const char* layer_type;  // in `layer_types`
};

// Returns the LatentConfig for `layers` layers of `heads` heads. Every option that would change the
// computation is refused by name.
absl::StatusOr<LatentConfig> ReadLatentConfig(const ConfigReader& config,
                                              const LatentFamily& family, const RopeConfig& rope,
                                              int layers, int heads);

}  // namespace sluice
