// ConfigReader makes typed, bounded reads from one JSON object of a config file. Every error names
// the file, the key, what was expected and what was found.
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
  // `where` is the prefix of messages: a path, or a path and the key of a nested object. REQUIRES:
  // `object` is a JSON object and outlives the reader.
  ConfigReader(std::string where, const nlohmann::json& object)
      : where_(std::move(where)), object_(object) {}

  // Returns whether the key is there. A key whose value is null counts as absent, which is how
  // Hugging Face configs mean it.
  bool Has(const char* key) const;
  bool IsNull(const char* key) const;
  const nlohmann::json& At(const char* key) const;

  // Returns an integer in [low, high], or INVALID_ARGUMENT if it is absent or anything else.
  absl::StatusOr<int64_t> Int(const char* key, int64_t low, int64_t high) const;
  // Returns a finite number in [low, high]. Integers count as numbers.
  absl::StatusOr<double> Number(const char* key, double low, double high) const;

  // Return the same, or the fallback if the key is absent.
  absl::StatusOr<int64_t> IntOr(const char* key, int64_t low, int64_t high, int64_t fallback) const;
  absl::StatusOr<double> NumberOr(const char* key, double low, double high, double fallback) const;
  absl::StatusOr<bool> BoolOr(const char* key, bool fallback) const;
  absl::StatusOr<std::string> StringOr(const char* key, const std::string& fallback) const;

  // Returns a reader of the object under `key`. REQUIRES: Has(key).
  absl::StatusOr<ConfigReader> Object(const char* key) const;

  // Returns an error "<where>: <key>: expected <expected>, found <the value, or nothing>".
  absl::Status Wrong(const char* key, const std::string& expected) const;
  // Returns an error "<where>: <key>: <the value> is not supported, only <supported>".
  absl::Status Unsupported(const char* key, const std::string& supported) const;

 private:
  std::string Found(const char* key) const;

  std::string where_;
  const nlohmann::json& object_;
};

}  // namespace sluice
