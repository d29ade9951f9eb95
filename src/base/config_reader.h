// Typed, bounded reads of one JSON object of a config file; every error names the file, the key,
// what was expected and what was found.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace sluice {

class ConfigReader {
 public:
  // `where` prefixes messages: a path, or a path and the key of a nested object. `object` must
  // outlive the reader and be an object.
  ConfigReader(std::string where, const nlohmann::json& object)
      : where_(std::move(where)), object_(object) {}

  // A key whose value is null counts as absent, as Hugging Face configs mean it.
  bool Has(const char* key) const;
  bool IsNull(const char* key) const;
  const nlohmann::json& At(const char* key) const;

  // An integer in [low, high]; INVALID_ARGUMENT where it is absent.
  absl::StatusOr<int64_t> Int(const char* key, int64_t low, int64_t high) const;
  // A finite number in [low, high]; integers count.
  absl::StatusOr<double> Number(const char* key, double low, double high) const;

  // The same, or the fallback where the key is absent.
  absl::StatusOr<int64_t> IntOr(const char* key, int64_t low, int64_t high, int64_t fallback) const;
  absl::StatusOr<double> NumberOr(const char* key, double low, double high, double fallback) const;
  absl::StatusOr<bool> BoolOr(const char* key, bool fallback) const;
  absl::StatusOr<std::string> StringOr(const char* key, const std::string& fallback) const;

  // The object under `key`. REQUIRES: Has(key).
  absl::StatusOr<ConfigReader> Object(const char* key) const;

  // "<where>: <key>: expected <expected>, found <the value, or nothing>".
  absl::Status Wrong(const char* key, const std::string& expected) const;
  // "<where>: <key>: <the value> is not supported, only <supported>".
  absl::Status Unsupported(const char* key, const std::string& supported) const;

 private:
  std::string Found(const char* key) const;

  std::string where_;
  const nlohmann::json& object_;
};

}  // namespace sluice
