// Loads of config.json texts, for tests of the config.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "src/model/model_config.h"

namespace sluice::testing {

nlohmann::json FixtureConfig(const std::string& name);
// Loads a config.json (and a generation_config.json) of these texts.
absl::StatusOr<ModelConfig> LoadConfigText(const std::string& config,
                                           const std::string& generation = "");
absl::StatusOr<ModelConfig> LoadConfig(const nlohmann::json& config);
// The fixture with some keys replaced (null: as it stands in the patch, a JSON null).
absl::StatusOr<ModelConfig> LoadConfigWith(const std::string& fixture,
                                           const nlohmann::json& changes);
absl::StatusOr<ModelConfig> LoadConfigWithout(const std::string& fixture, const std::string& key);

// The load fails, as one sentence with every one of `words`.
void CheckFails(const absl::StatusOr<ModelConfig>& loaded, absl::StatusCode code,
                const std::vector<std::string>& words);

inline constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
inline constexpr auto kUnsupported = absl::StatusCode::kUnimplemented;

}  // namespace sluice::testing
