#include "src/config/config.h"

#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "src/base/nearest_name.h"
#include "src/base/status_macros.h"
#include "src/config/config_file.h"

namespace sluice {
namespace {

constexpr std::string_view kEnvPrefix = "SLUICE_";
constexpr const char* kConfigFileEnv = "SLUICE_CONFIG";

// Variables that are not settings: switches of tests, the build's options, which people export, and
// the nodes that tools/sluice talks to.
constexpr const char* kOtherVariables[] = {
    "SLUICE_CUDA",    "SLUICE_CUDA_ARCHITECTURES", "SLUICE_DECODE", "SLUICE_JEMALLOC",
    "SLUICE_PREFILL", "SLUICE_SANITIZER",          "SLUICE_TESTS"};

// A Service named sluice or sluice-decode makes Kubernetes give every pod SLUICE_SERVICE_HOST,
// SLUICE_DECODE_SERVICE_PORT_GRPC, SLUICE_PORT=tcp://..., SLUICE_PORT_7000_TCP_ADDR and the like.
bool IsKubernetesVariable(const std::string& name, const std::string& value) {
  if (absl::StrContains(name, "_SERVICE_HOST") || absl::StrContains(name, "_SERVICE_PORT")) {
    return true;
  }
  if (absl::EndsWith(name, "_PORT") && absl::StrContains(value, "://")) return true;
  const size_t port = name.find("_PORT_");
  return port != std::string::npos &&
         (absl::StrContains(name, "_TCP") || absl::StrContains(name, "_UDP"));
}

bool IsOtherVariable(const std::string& name, const std::string& value) {
  return absl::StartsWith(name, "SLUICE_TEST_") ||
         std::find(std::begin(kOtherVariables), std::end(kOtherVariables), name) !=
             std::end(kOtherVariables) ||
         IsKubernetesVariable(name, value);
}

// "max_sequences (--max-sequences) must be ..., but is ...".
absl::Status Located(const Setting& setting, const std::string& origin,
                     const absl::Status& status) {
  if (status.ok()) return status;
  return absl::InvalidArgumentError(
      absl::StrCat(setting.name(), " (", origin, ") ", status.message()));
}

class Loader {
 public:
  Loader(std::string_view program, const Environment& environment)
      : program_(program), environment_(environment) {
    result_.config = DefaultConfig(program);
    for (const Setting& setting : AllSettings()) result_.origins[setting.name()] = "default";
  }

  // Applies the sources in rising order of precedence: each overwrites what came before.
  absl::StatusOr<LoadedConfig> Load(const CommandLine& line) {
    result_.action = line.action;
    const auto variable = environment_.find(kConfigFileEnv);
    if (line.config_file.has_value()) {
      SLUICE_RETURN_IF_ERROR(ApplyFile(*line.config_file, "--config"));
    } else if (variable != environment_.end() && !variable->second.empty()) {
      SLUICE_RETURN_IF_ERROR(ApplyFile(variable->second, kConfigFileEnv));
    }
    SLUICE_RETURN_IF_ERROR(ApplyEnvironment());
    for (const FlagValue& flag : line.flags) {
      SLUICE_RETURN_IF_ERROR(Apply(*flag.setting, flag.value, flag.spelling));
    }
    SLUICE_RETURN_IF_ERROR(CheckRequired());
    SLUICE_RETURN_IF_ERROR(CheckQuality());
    return std::move(result_);
  }

 private:
  absl::Status Apply(const Setting& setting, const std::string& value, const std::string& origin) {
    if (!setting.AppliesTo(program_)) {
      Config unused;
      return Located(setting, origin, setting.Parse(value, &unused));
    }
    SLUICE_RETURN_IF_ERROR(Located(setting, origin, setting.Parse(value, &result_.config)));
    result_.origins[setting.name()] = origin;
    return absl::OkStatus();
  }

  absl::Status ApplyFile(const std::string& path, const char* given_by) {
    if (path.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(given_by, " names no file"));
    }
    absl::StatusOr<std::vector<ConfigFileEntry>> entries = ReadConfigFile(path);
    if (!entries.ok()) {
      return absl::Status(entries.status().code(),
                          absl::StrCat(given_by, ": ", entries.status().message()));
    }
    for (const ConfigFileEntry& entry : *entries) {
      const std::string origin = absl::StrCat(path, ":", entry.line);
      const Setting* setting = FindSetting(entry.section, entry.key);
      if (setting == nullptr) return UnknownKey(entry, origin);
      if (entry.quoted && setting->is_bare_scalar()) {
        return absl::InvalidArgumentError(absl::StrCat(
            setting->name(), " (", origin, ") must be ", setting->Allowed(),
            ", but is the quoted text \"", Printable(entry.value), "\": write it without quotes"));
      }
      SLUICE_RETURN_IF_ERROR(Apply(*setting, entry.value, origin));
    }
    return absl::OkStatus();
  }

  static absl::Status UnknownKey(const ConfigFileEntry& entry, const std::string& origin) {
    if (const Setting* whole = FindSetting(entry.key); whole != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(whole->name(), " (", origin, ") is written in a file as ",
                       whole->FileForm(entry.value.empty() ? "\"\"" : Printable(entry.value)),
                       whole->section().empty() ? " at its top" : ""));
    }
    std::vector<std::string> known;
    for (const Setting& setting : AllSettings()) {
      if (setting.section() == entry.section) known.push_back(setting.key());
      if (entry.section.empty() && !setting.section().empty()) known.push_back(setting.section());
    }
    return absl::InvalidArgumentError(
        absl::StrCat("unknown setting ", Printable(entry.key),
                     entry.section.empty() ? "" : absl::StrCat(" of ", entry.section), " (", origin,
                     ")", DidYouMean(entry.key, known), "; --help lists them all"));
  }

  absl::Status ApplyEnvironment() {
    std::map<std::string, const Setting*> settings;
    for (const Setting& setting : AllSettings()) settings[setting.env()] = &setting;
    for (const auto& [name, value] : environment_) {
      if (!absl::StartsWith(name, "SLUICE_") || name == kConfigFileEnv) continue;
      if (const auto found = settings.find(name); found != settings.end()) {
        SLUICE_RETURN_IF_ERROR(Apply(*found->second, value, name));
      } else if (!IsOtherVariable(name, value)) {
        std::vector<std::string> known = {kConfigFileEnv};
        for (const auto& [env, setting] : settings) known.push_back(env);
        return absl::InvalidArgumentError(absl::StrCat("unknown environment variable ",
                                                       Printable(name), DidYouMean(name, known),
                                                       "; unset it, or see --help for the names"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status CheckRequired() const {
    for (const Setting& setting : AllSettings()) {
      if (!setting.AppliesTo(program_) || !setting.options().required()) continue;
      if (!setting.Format(result_.config).empty()) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          setting.name(), " is required: give ", setting.flag(), " ", setting.options().metavar(),
          ", ", setting.env(), ", or ", setting.name(), " in the file of --config"));
    }
    return absl::OkStatus();
  }

  // A quality beside a policy by name would promise what nobody keeps. The default is allowed: a
  // file that --check-config printed has it.
  absl::Status CheckQuality() const {
    const Setting& quality = *FindSetting("quality");
    if (result_.config.policy() == "auto" ||
        quality.Format(result_.config) == quality.options().default_value()) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("quality (", result_.origins.at("quality"),
                     ") is for policy auto, and policy is ", result_.config.policy(), " (",
                     result_.origins.at("policy"), "): set policy to auto, or leave quality out"));
  }

  const std::string_view program_;
  const Environment& environment_;
  LoadedConfig result_;
};

// Returns a value as YAML. Texts are always quoted, so that none is read as a number or a comment.
std::string YamlValue(const Setting& setting, const Config& config) {
  std::string value = setting.Format(config);
  if (setting.is_bare_scalar() || setting.options().unit() == config::v1::UNIT_BYTES ||
      setting.options().unit() == config::v1::UNIT_SECONDS) {
    return value;
  }
  return absl::StrCat("\"", absl::StrReplaceAll(value, {{"\\", "\\\\"}, {"\"", "\\\""}}), "\"");
}

}  // namespace

Environment SluiceEnvironment() {
  Environment environment;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    const size_t equals = text.find('=');
    if (!text.starts_with(kEnvPrefix) || equals == std::string_view::npos) continue;
    environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return environment;
}

absl::StatusOr<LoadedConfig> LoadConfig(std::string_view program, std::span<const std::string> args,
                                        const Environment& environment) {
  SLUICE_ASSIGN_OR_RETURN(const CommandLine line, ParseCommandLine(program, args));
  if (line.action == Action::kHelp || line.action == Action::kVersion) {
    LoadedConfig result;
    result.action = line.action;
    return result;
  }
  return Loader(program, environment).Load(line);
}

std::string EffectiveConfigYaml(std::string_view program, const LoadedConfig& loaded) {
  std::string yaml = absl::StrCat("# The effective configuration of ", std::string(program), ".\n");
  std::string section;  // sections are contiguous in the schema
  for (const Setting& setting : AllSettings()) {
    if (!setting.AppliesTo(program)) continue;
    if (setting.section() != section && !setting.section().empty()) {
      absl::StrAppend(&yaml, setting.section(), ":\n");
    }
    section = setting.section();
    const std::string line = absl::StrCat(section.empty() ? "" : "  ", setting.key(), ": ",
                                          YamlValue(setting, loaded.config));
    const size_t width = std::max(line.size(), size_t{48});
    absl::StrAppend(&yaml, line, std::string(width - line.size(), ' '), "  # ",
                    loaded.origins.at(setting.name()), "\n");
  }
  return yaml;
}

}  // namespace sluice
