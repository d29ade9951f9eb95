// The prompts that a profile is made of.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace sluice {

using Prompt = std::vector<int32_t>;  // Token ids.

// Parses prompts from text, one a line; empty lines are skipped. A line has token ids with blanks
// or commas between them, or it is JSON: a list of ids, or an object that has one under
// "prompt_token_ids". All ids must be below `vocab`. INVALID_ARGUMENT names `where` and the line,
// what was expected and what was found.
absl::StatusOr<std::vector<Prompt>> ParseTraffic(const std::string& text, const std::string& where,
                                                 int64_t vocab);

// Parses a file. NOT_FOUND: there is no such file.
absl::StatusOr<std::vector<Prompt>> ReadTraffic(const std::string& path, int64_t vocab);

// Returns `count` prompts of `tokens` random ids each.
std::vector<Prompt> RandomTraffic(int64_t count, int64_t tokens, int64_t vocab, uint64_t seed);

}  // namespace sluice
