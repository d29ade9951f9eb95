// Loads config.json texts, for tests of the config.
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
// Returns the fixture's config with the keys of a patch replaced. A null in the patch stays a JSON
// null.
absl::StatusOr<ModelConfig> LoadConfigWith(const std::string& fixture,
                                           const nlohmann::json& changes);
absl::StatusOr<ModelConfig> LoadConfigWithout(const std::string& fixture, const std::string& key);

// Checks that the load failed with one sentence that has every one of `words`.
void CheckFails(const absl::StatusOr<ModelConfig>& loaded, absl::StatusCode code,
                const std::vector<std::string>& words);

inline constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
inline constexpr auto kUnsupported = absl::StatusCode::kUnimplemented;

}  // namespace sluice::testing
