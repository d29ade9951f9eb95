// JSON files of other people: bounded in size and depth, errors that name the file.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace sluice {

inline constexpr int64_t kMaxConfigBytes = int64_t{4} << 20;       // real ones: a few KiB
inline constexpr int64_t kMaxIndexBytes = int64_t{64} << 20;       // real ones: up to about 10 MiB
inline constexpr int64_t kMaxTokenizerBytes = int64_t{256} << 20;  // real ones: up to about 35 MiB
inline constexpr int kMaxJsonDepth = 64;

// A foreign text as an error shows it: cut where nobody would read on, one line, nothing
// unprintable.
std::string Shown(std::string_view text);
// The same of a JSON value.
std::string ShownJson(const nlohmann::json& value);

// Parses [text, text + size), which must be one JSON object. `what` names it in errors. A repeated
// key at the top level, nesting past kMaxJsonDepth (the parse stops there) and invalid UTF-8 are
// INVALID_ARGUMENT too. What
// stands under `skip_key` in the object, or in an object directly inside it, is parsed and not
// kept: for large values that nobody will read.
absl::StatusOr<nlohmann::json> ParseJsonObject(const char* text, int64_t size,
                                               const std::string& what,
                                               const std::string& skip_key = "");

// The object in the file. NOT_FOUND where there is none; INVALID_ARGUMENT where it is larger than
// `max_bytes`, is no regular file, or ParseJsonObject refuses it.
absl::StatusOr<nlohmann::json> ReadJsonFile(const std::string& path, int64_t max_bytes,
                                            const std::string& skip_key = "");

}  // namespace sluice
