// Readers for JSON files that come from outside. Size and depth are bounded, and errors name the
// file.
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

// Returns a text from outside as an error may show it: cut to a length that one reads, on one line,
// with nothing unprintable.
std::string Shown(std::string_view text);
// Returns the same for a JSON value.
std::string ShownJson(const nlohmann::json& value);

// Parses [text, text + size), which must be one JSON object. `what` names it in errors. A repeated
// key at the top level, nesting past kMaxJsonDepth (the parse stops there) and invalid UTF-8 are
// INVALID_ARGUMENT too. The value under `skip_key` in the object, or in an object directly inside
// it, is parsed and not kept; this is for large values that nobody will read.
absl::StatusOr<nlohmann::json> ParseJsonObject(const char* text, int64_t size,
                                               const std::string& what,
                                               const std::string& skip_key = "");

// Returns the object in the file. NOT_FOUND if there is no file; INVALID_ARGUMENT if it is larger
// than `max_bytes`, is no regular file, or ParseJsonObject refuses it.
absl::StatusOr<nlohmann::json> ReadJsonFile(const std::string& path, int64_t max_bytes,
                                            const std::string& skip_key = "");

}  // namespace sluice
