// The prompts that a profile is made of.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace sluice {

using Prompt = std::vector<int32_t>;  // token ids

// Prompts from text, one a line, empty lines aside: token ids with blanks or commas between them,
// or JSON: a list of ids, or an object that has one under "prompt_token_ids". INVALID_ARGUMENT
// names `where` and the line, what was expected and what was found. `vocab`: ids are below it.
absl::StatusOr<std::vector<Prompt>> ParseTraffic(const std::string& text, const std::string& where,
                                                 int64_t vocab);

// The same from a file. NOT_FOUND: there is none.
absl::StatusOr<std::vector<Prompt>> ReadTraffic(const std::string& path, int64_t vocab);

// `count` prompts of `tokens` random ids each.
std::vector<Prompt> RandomTraffic(int64_t count, int64_t tokens, int64_t vocab, uint64_t seed);

}  // namespace sluice
