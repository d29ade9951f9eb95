// The settings of the schema (proto/sluice/config/v1/config.proto), found by reflection: the names
// of each as a flag, in the environment and in a file, its allowed values, and how it is read and
// written. No code in this folder names a single setting. Thread-safe; meant for use at start.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "sluice/config/v1/config.pb.h"

namespace sluice {

using Config = config::v1::Config;

// The value of a count of bytes that was given as the word auto. No count of bytes that a user
// writes is as large (see ParseBytes).
inline constexpr uint64_t kAutoBytes = std::numeric_limits<uint64_t>::max();
inline constexpr uint32_t kAutoCount = std::numeric_limits<uint32_t>::max();

// One field of Config with its options.
class Setting {
 public:
  explicit Setting(const google::protobuf::FieldDescriptor* field);

  const std::string& name() const { return field_->name(); }  // ess_warm_up
  const std::string& flag() const { return flag_; }           // --ess-warm-up
  const std::string& env() const { return env_; }             // SLUICE_ESS_WARM_UP
  const config::v1::Setting& options() const { return *options_; }
  // The mapping of a file that holds the setting ("ess"), or empty for the top of the file.
  const std::string& section() const { return options_->section(); }
  // The setting's name within its section: warm_up.
  std::string key() const;
  // An entry of a file that gives the setting this value: "ess: {warm_up: true}".
  std::string FileForm(std::string_view value) const;

  bool is_bool() const;
  // Returns true for numbers without a unit and for booleans, which a file must not quote.
  bool is_bare_scalar() const;
  bool AppliesTo(std::string_view program) const;
  // Returns the default of `program` as a user would write it; empty means that there is none.
  std::string DefaultFor(std::string_view program) const;

  // Returns the allowed values as text that follows "must be": "a whole number from 1 to 4096".
  std::string Allowed() const;

  // Reads `text`, as a user writes it, into the field. INVALID_ARGUMENT: "must be ..., but is ...".
  absl::Status Parse(std::string_view text, Config* config) const;

  // Returns the field as a user would write it; Parse() gives the same value back.
  std::string Format(const Config& config) const;

 private:
  absl::Status ParseString(std::string_view text, Config* config) const;
  absl::Status ParseNumber(std::string_view text, Config* config) const;
  absl::Status Refuse(std::string_view text) const;
  std::string FormatNumber(double value) const;

  const google::protobuf::FieldDescriptor* field_;
  const config::v1::Setting* options_;
  std::string flag_;
  std::string env_;
};

// Returns every setting, in the schema's order.
std::span<const Setting> AllSettings();

// Returns foreign text as an error shows it: shortened to 80 bytes, without control characters.
std::string Printable(std::string_view text);

// Returns the setting with that name (hbm_bytes), or null.
const Setting* FindSetting(std::string_view name);
// Returns the setting with that key in that section of a file, or null. An empty section is the top
// of the file.
const Setting* FindSetting(std::string_view section, std::string_view key);
// Returns whether some setting stands in a section of that name.
bool IsSection(std::string_view name);

// Returns the schema's defaults in `program`. A default that the schema itself refuses is a broken
// invariant.
Config DefaultConfig(std::string_view program = "sluice-server");

}  // namespace sluice
