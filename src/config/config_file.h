// Reads a configuration file, YAML or JSON, into its keys and values. JSON is read as the YAML that
// it is: one path, one set of rules.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace sluice {

// Some 40 settings of at most 4 KiB each fit several times over.
inline constexpr size_t kMaxConfigFileBytes = 256 << 10;

struct ConfigFileEntry {
  std::string key;
  std::string value;
  bool quoted;  // "32" rather than 32
  int line;     // counted from 1
};

// The entries of the file at `path`, in order. A file with nothing but comments has none.
// NOT_FOUND: no such file. INVALID_ARGUMENT: not a regular file, too large, not YAML, not one flat
// mapping of names to single values, a key that is there twice.
absl::StatusOr<std::vector<ConfigFileEntry>> ReadConfigFile(const std::string& path);

// The same for a text; `name` is what errors call it.
absl::StatusOr<std::vector<ConfigFileEntry>> ParseConfigText(const std::string& text,
                                                             const std::string& name);

}  // namespace sluice
