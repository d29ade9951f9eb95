#include "tests/unit/model/config_support.h"

#include <catch2/catch.hpp>

#include "tests/fixtures/fixtures.h"

namespace sluice::testing {

using nlohmann::json;

json FixtureConfig(const std::string& name) {
  return json::parse(fixtures::ReadFile(fixtures::SourceDir(name) + "/config.json").value());
}

absl::StatusOr<ModelConfig> LoadConfigText(const std::string& config,
                                           const std::string& generation) {
  const fixtures::TempDir dir;
  REQUIRE(fixtures::WriteFile(dir.File("config.json"), config).ok());
  if (!generation.empty()) {
    REQUIRE(fixtures::WriteFile(dir.File("generation_config.json"), generation).ok());
  }
  return LoadModelConfig(dir.path());
}

absl::StatusOr<ModelConfig> LoadConfig(const json& config) { return LoadConfigText(config.dump()); }

absl::StatusOr<ModelConfig> LoadConfigWith(const std::string& fixture, const json& changes) {
  json config = FixtureConfig(fixture);
  for (const auto& [key, value] : changes.items()) config[key] = value;
  return LoadConfig(config);
}

absl::StatusOr<ModelConfig> LoadConfigWithout(const std::string& fixture, const std::string& key) {
  json config = FixtureConfig(fixture);
  REQUIRE(config.erase(key) == 1);
  return LoadConfig(config);
}

void CheckFails(const absl::StatusOr<ModelConfig>& loaded, absl::StatusCode code,
                const std::vector<std::string>& words) {
  REQUIRE_FALSE(loaded.ok());
  const std::string message(loaded.status().message());
  INFO(message);
  CHECK(loaded.status().code() == code);
  CHECK(message.find('\n') == std::string::npos);
  for (const std::string& word : words) {
    INFO("expected in it: " << word);
    CHECK(message.find(word) != std::string::npos);
  }
}

}  // namespace sluice::testing
