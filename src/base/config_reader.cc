#include "src/base/config_reader.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "src/base/json_file.h"
#include "src/base/status_macros.h"

namespace sluice {

using nlohmann::json;

bool ConfigReader::Has(const char* key) const {
  const auto it = object_.find(key);
  return it != object_.end() && !it->is_null();
}

bool ConfigReader::IsNull(const char* key) const {
  const auto it = object_.find(key);
  return it != object_.end() && it->is_null();
}

const json& ConfigReader::At(const char* key) const { return object_.at(key); }

absl::StatusOr<int64_t> ConfigReader::Int(const char* key, int64_t low, int64_t high) const {
  const auto expected = absl::StrCat("an integer from ", low, " to ", high);
  if (!Has(key)) return Wrong(key, expected);
  const json& value = At(key);
  const bool fits = value.is_number_unsigned()
                        ? value.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX)
                        : value.is_number_integer();
  if (!fits || value.get<int64_t>() < low || value.get<int64_t>() > high) {
    return Wrong(key, expected);
  }
  return value.get<int64_t>();
}

absl::StatusOr<double> ConfigReader::Number(const char* key, double low, double high) const {
  const auto expected = absl::StrFormat("a number from %g to %g", low, high);
  if (!Has(key) || !At(key).is_number()) return Wrong(key, expected);
  const double value = At(key).get<double>();
  if (!(value >= low && value <= high)) return Wrong(key, expected);
  return value;
}

absl::StatusOr<int64_t> ConfigReader::IntOr(const char* key, int64_t low, int64_t high,
                                            int64_t fallback) const {
  if (!Has(key)) return fallback;
  return Int(key, low, high);
}

absl::StatusOr<double> ConfigReader::NumberOr(const char* key, double low, double high,
                                              double fallback) const {
  if (!Has(key)) return fallback;
  return Number(key, low, high);
}

absl::StatusOr<bool> ConfigReader::BoolOr(const char* key, bool fallback) const {
  if (!Has(key)) return fallback;
  if (!At(key).is_boolean()) return Wrong(key, "true or false");
  return At(key).get<bool>();
}

absl::StatusOr<std::string> ConfigReader::StringOr(const char* key,
                                                   const std::string& fallback) const {
  if (!Has(key)) return fallback;
  if (!At(key).is_string()) return Wrong(key, "a string");
  return At(key).get<std::string>();
}

absl::StatusOr<ConfigReader> ConfigReader::Object(const char* key) const {
  if (!At(key).is_object()) return Wrong(key, "an object");
  return ConfigReader(absl::StrCat(where_, ": ", key), At(key));
}

absl::Status ConfigReader::Wrong(const char* key, const std::string& expected) const {
  return absl::InvalidArgumentError(
      absl::StrCat(where_, ": ", key, ": expected ", expected, ", found ", Found(key)));
}

absl::Status ConfigReader::Unsupported(const char* key, const std::string& supported) const {
  return absl::UnimplementedError(
      absl::StrCat(where_, ": ", key, ": ", Found(key), " is not supported, only ", supported));
}

std::string ConfigReader::Found(const char* key) const {
  const auto it = object_.find(key);
  if (it == object_.end()) return "nothing";
  return ShownJson(*it);
}

}  // namespace sluice
