#include "src/config/setting.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/flags/marshalling.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/config/units.h"

namespace sluice {
namespace {

using google::protobuf::FieldDescriptor;

// This is longer than any path that Linux opens (PATH_MAX is 4096 with its NUL).
constexpr size_t kMaxTextBytes = 4096;

constexpr std::string_view kAuto = "auto";

absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

std::string Shown(std::string_view text) {
  return text.empty() ? "empty" : absl::StrCat("\"", Printable(text), "\"");
}

}  // namespace

Setting::Setting(const FieldDescriptor* field)
    : field_(field),
      options_(&field->options().GetExtension(config::v1::setting)),
      flag_(absl::StrCat("--", absl::StrReplaceAll(field->name(), {{"_", "-"}}))),
      env_(absl::StrCat("SLUICE_", absl::AsciiStrToUpper(field->name()))) {
  SLUICE_CHECK(!field->is_repeated(), "the schema is flat: ", name());
  SLUICE_CHECK(section().empty() || name().starts_with(section() + "_"), name(),
               " does not begin with its section");
}

std::string Setting::key() const {
  return section().empty() ? name() : name().substr(section().size() + 1);
}

std::string Setting::FileForm(std::string_view value) const {
  const std::string entry = absl::StrCat(key(), ": ", View(value));
  return section().empty() ? entry : absl::StrCat(section(), ": {", entry, "}");
}

bool Setting::is_bool() const { return field_->cpp_type() == FieldDescriptor::CPPTYPE_BOOL; }

bool Setting::is_bare_scalar() const {
  return field_->cpp_type() != FieldDescriptor::CPPTYPE_STRING &&
         options_->unit() == config::v1::UNIT_NONE;
}

bool Setting::AppliesTo(std::string_view program) const {
  const auto& programs = options_->programs();
  return programs.empty() || std::find(programs.begin(), programs.end(), program) != programs.end();
}

std::string Setting::DefaultFor(std::string_view program) const {
  const auto& none = options_->empty_for();
  const bool empty = std::find(none.begin(), none.end(), program) != none.end();
  return empty ? "" : options_->default_value();
}

std::string Setting::FormatNumber(double value) const {
  switch (options_->unit()) {
    case config::v1::UNIT_BYTES:
      return FormatBytes(static_cast<uint64_t>(value));
    case config::v1::UNIT_SECONDS:
      return FormatSeconds(value);
    default:
      // Bounds of counts are whole and below 2^53.
      return value == std::floor(value) ? absl::StrCat(static_cast<int64_t>(value))
                                        : absl::StrCat(value);
  }
}

std::string Setting::Allowed() const {
  if (!options_->choices().empty()) {
    if (options_->choices_size() == 1) return absl::StrCat("\"", options_->choices(0), "\"");
    return absl::StrCat("one of ", absl::StrJoin(options_->choices(), ", "));
  }
  std::string what;
  std::string example;
  switch (field_->cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return "true or false";
    case FieldDescriptor::CPPTYPE_STRING:
      if (options_->unit() != config::v1::UNIT_ADDRESS) return "text";
      return absl::StrCat("host:port with a port from 0 to 65535",
                          options_->required() ? "" : ", or empty for none");
    case FieldDescriptor::CPPTYPE_DOUBLE:
      what = "a number";
      break;
    default:
      what = "a whole number";
  }
  if (options_->unit() == config::v1::UNIT_BYTES) {
    what = "a whole number of bytes";
    example = options_->may_be_auto() ? ", or auto (such as 1073741824, 512MiB or 1GiB)"
                                      : " (such as 1073741824, 512MiB or 1GiB)";
  } else if (options_->unit() == config::v1::UNIT_SECONDS) {
    what = "a time";
    example = " (such as 30, 1.5s, 200ms or 2m)";
  }
  if (options_->max() > 0) {
    absl::StrAppend(&what, " from ", FormatNumber(options_->min()), " to ",
                    FormatNumber(options_->max()));
  } else {
    absl::StrAppend(&what, " of at least ", FormatNumber(options_->min()));
  }
  if (options_->may_be_auto() && example.empty()) example = ", or auto";
  return what + example;
}

absl::Status Setting::Refuse(std::string_view text) const {
  return absl::InvalidArgumentError(absl::StrCat("must be ", Allowed(), ", but is ", Shown(text)));
}

absl::Status Setting::ParseString(std::string_view text, Config* config) const {
  if (text.size() > kMaxTextBytes) {
    return absl::InvalidArgumentError(absl::StrCat("must be at most ", kMaxTextBytes,
                                                   " bytes long, but is ", text.size(), " long"));
  }
  for (char c : text) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) {
      return absl::InvalidArgumentError(
          absl::StrCat("must be text without control characters, but is ", Shown(text)));
    }
  }
  if (options_->required() && text.empty()) {
    return absl::InvalidArgumentError("must not be empty");
  }
  const auto& choices = options_->choices();
  if (!choices.empty() && std::find(choices.begin(), choices.end(), text) == choices.end()) {
    return Refuse(text);
  }
  if (options_->unit() == config::v1::UNIT_ADDRESS && !text.empty() && !IsAddress(text)) {
    return Refuse(text);
  }
  if (options_->unit() == config::v1::UNIT_FAILPOINTS) {
    const absl::Status status = ParseFailpoints(text).status();
    if (!status.ok()) return absl::InvalidArgumentError(absl::StrCat("has ", status.message()));
  }
  config->GetReflection()->SetString(config, field_, std::string(text));
  return absl::OkStatus();
}

absl::Status Setting::ParseNumber(std::string_view text, Config* config) const {
  const auto* reflection = config->GetReflection();
  std::string error;  // not shown: Abseil's own words name no bounds
  if (field_->cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE) {
    double value = 0;
    if (options_->unit() == config::v1::UNIT_SECONDS) {
      const std::optional<double> seconds = ParseSeconds(text);
      if (!seconds.has_value()) return Refuse(text);
      value = *seconds;
    } else if (!absl::ParseFlag(View(text), &value, &error)) {
      return Refuse(text);
    }
    // Written so that NaN is refused.
    if (!(value >= options_->min() && std::isfinite(value))) return Refuse(text);
    if (options_->max() > 0 && value > options_->max()) return Refuse(text);
    reflection->SetDouble(config, field_, value);
    return absl::OkStatus();
  }

  if (options_->may_be_auto() && text == kAuto) {
    if (field_->cpp_type() == FieldDescriptor::CPPTYPE_UINT32) {
      reflection->SetUInt32(config, field_, kAutoCount);
    } else {
      reflection->SetUInt64(config, field_, kAutoBytes);
    }
    return absl::OkStatus();
  }
  uint64_t value = 0;
  if (options_->unit() == config::v1::UNIT_BYTES) {
    const std::optional<uint64_t> bytes = ParseBytes(text);
    if (!bytes.has_value()) return Refuse(text);
    value = *bytes;
  } else if (!absl::ParseFlag(View(text), &value, &error)) {
    return Refuse(text);
  }
  if (value < static_cast<uint64_t>(options_->min())) return Refuse(text);
  if (options_->max() > 0 && value > static_cast<uint64_t>(options_->max())) return Refuse(text);
  if (field_->cpp_type() == FieldDescriptor::CPPTYPE_UINT32) {
    if (value > std::numeric_limits<uint32_t>::max()) return Refuse(text);
    reflection->SetUInt32(config, field_, static_cast<uint32_t>(value));
  } else {
    reflection->SetUInt64(config, field_, value);
  }
  return absl::OkStatus();
}

absl::Status Setting::Parse(std::string_view text, Config* config) const {
  switch (field_->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return ParseString(text, config);
    case FieldDescriptor::CPPTYPE_BOOL: {
      bool value = false;
      std::string error;
      if (!absl::ParseFlag(View(text), &value, &error)) return Refuse(text);
      config->GetReflection()->SetBool(config, field_, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_DOUBLE:
    case FieldDescriptor::CPPTYPE_UINT32:
    case FieldDescriptor::CPPTYPE_UINT64:
      return ParseNumber(text, config);
    default:
      SLUICE_CHECK(false, "the loader reads no fields of type ", field_->cpp_type_name(), ": ",
                   name());
  }
}

std::string Setting::Format(const Config& config) const {
  const auto* reflection = config.GetReflection();
  switch (field_->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return reflection->GetString(config, field_);
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection->GetBool(config, field_) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      const std::string seconds = FormatSeconds(reflection->GetDouble(config, field_));
      return options_->unit() == config::v1::UNIT_SECONDS ? seconds
                                                          : seconds.substr(0, seconds.size() - 1);
    }
    default: {
      const bool narrow = field_->cpp_type() == FieldDescriptor::CPPTYPE_UINT32;
      const uint64_t value =
          narrow ? reflection->GetUInt32(config, field_) : reflection->GetUInt64(config, field_);
      if (options_->may_be_auto() && value == (narrow ? kAutoCount : kAutoBytes)) {
        return std::string(kAuto);
      }
      return options_->unit() == config::v1::UNIT_BYTES ? FormatBytes(value) : absl::StrCat(value);
    }
  }
}

std::span<const Setting> AllSettings() {
  static const auto* settings = [] {
    auto* all = new std::vector<Setting>;
    const auto* descriptor = Config::descriptor();
    for (int i = 0; i < descriptor->field_count(); ++i) all->emplace_back(descriptor->field(i));
    return all;
  }();
  return *settings;
}

std::string Printable(std::string_view text) {
  constexpr size_t kShownBytes = 80;
  std::string shown(text.substr(0, kShownBytes));
  for (char& c : shown) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) c = '?';
  }
  return text.size() > kShownBytes ? shown + "..." : shown;
}

const Setting* FindSetting(std::string_view name) {
  for (const Setting& setting : AllSettings()) {
    if (setting.name() == name) return &setting;
  }
  return nullptr;
}

const Setting* FindSetting(std::string_view section, std::string_view key) {
  for (const Setting& setting : AllSettings()) {
    if (setting.section() == section && setting.key() == key) return &setting;
  }
  return nullptr;
}

bool IsSection(std::string_view name) {
  for (const Setting& setting : AllSettings()) {
    if (!name.empty() && setting.section() == name) return true;
  }
  return false;
}

Config DefaultConfig(std::string_view program) {
  Config config;
  for (const Setting& setting : AllSettings()) {
    if (setting.options().required() && setting.options().default_value().empty()) continue;
    const absl::Status status = setting.Parse(setting.DefaultFor(program), &config);
    SLUICE_CHECK(status.ok(), "default of ", setting.name(), " ", status.message());
  }
  return config;
}

}  // namespace sluice
