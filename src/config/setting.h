// The settings of the schema (proto/sluice/config/v1/config.proto), found by reflection: what each
// is called as a flag, in the environment and in a file, what it may be, and how it is read and
// written. Nothing in this folder names a single setting. Thread-safe; for use at start.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "sluice/config/v1/config.pb.h"

namespace sluice {

using Config = config::v1::Config;

// One field of Config with its option.
class Setting {
 public:
  explicit Setting(const google::protobuf::FieldDescriptor* field);

  const std::string& name() const { return field_->name(); }  // hbm_bytes: in a file
  const std::string& flag() const { return flag_; }           // --hbm-bytes
  const std::string& env() const { return env_; }             // SLUICE_HBM_BYTES
  const config::v1::Setting& options() const { return *options_; }

  bool is_bool() const;
  // A number without a unit, or a boolean: what a file may not write as a quoted string.
  bool is_bare_scalar() const;
  bool AppliesTo(std::string_view program) const;
  // What a program that is told nothing takes, as a user would write it; empty: none.
  std::string DefaultFor(std::string_view program) const;

  // What the value may be, to follow "must be": "a whole number from 1 to 4096".
  std::string Allowed() const;

  // Reads `text`, as a user writes it, into the field. INVALID_ARGUMENT: "must be ..., but is ...".
  absl::Status Parse(std::string_view text, Config* config) const;

  // The field as a user would write it; Parse() gives the same value back.
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

// Every setting, in the schema's order.
std::span<const Setting> AllSettings();

// Foreign text as an error shows it: cut where nobody would read on, nothing unprintable.
std::string Printable(std::string_view text);

// The setting of that name (hbm_bytes), or null.
const Setting* FindSetting(std::string_view name);

// The schema's defaults in `program`. A default that the schema itself refuses is a broken
// invariant.
Config DefaultConfig(std::string_view program = "sluice-server");

}  // namespace sluice
