// Reads a configuration file, YAML or JSON, into its keys and values. JSON takes the same path and
// rules, since it is YAML too.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace sluice {

// Some 60 settings of at most 4 KiB each fit.
inline constexpr size_t kMaxConfigFileBytes = 256 << 10;

struct ConfigFileEntry {
  std::string section;  // mapping that holds the entry; empty: the top of the file
  std::string key;
  std::string value;
  bool quoted;  // "32" rather than 32
  int line;     // counted from 1
};

// Returns the entries of the file at `path`, in order. A file with nothing but comments has none.
// NOT_FOUND: there is no such file. INVALID_ARGUMENT: it is not a regular file, too large, or not
// YAML; it is anything but one mapping of names to single values and of sections (IsSection) to
// such mappings; or a key is there twice.
absl::StatusOr<std::vector<ConfigFileEntry>> ReadConfigFile(const std::string& path);

// Does the same for a text, which errors call `name`.
absl::StatusOr<std::vector<ConfigFileEntry>> ParseConfigText(const std::string& text,
                                                             const std::string& name);

}  // namespace sluice
