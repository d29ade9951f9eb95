#include "src/profile/traffic.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "src/base/json_file.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

using nlohmann::json;

constexpr char kKey[] = "prompt_token_ids";

absl::Status Wrong(const std::string& where, const std::string& expected,
                   const std::string& found) {
  return absl::InvalidArgumentError(
      absl::StrCat(where, ": expected ", expected, ", found ", found));
}

absl::StatusOr<Prompt> ParseJsonLine(const std::string& line, const std::string& where,
                                     int64_t vocab) {
  json ids;
  if (line.front() == '[') {
    ids = json::parse(line, nullptr, /*allow_exceptions=*/false);
  } else {
    SLUICE_ASSIGN_OR_RETURN(const json object,
                            ParseJsonObject(line.data(), static_cast<int64_t>(line.size()), where));
    if (!object.contains(kKey)) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": an object without \"", kKey, "\""));
    }
    ids = object[kKey];
  }
  if (!ids.is_array()) return Wrong(where, "a list of token ids", ShownJson(ids));
  Prompt prompt;
  for (const json& id : ids) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= vocab) {
      return Wrong(where, absl::StrCat("token ids from 0 to ", vocab - 1), ShownJson(id));
    }
    prompt.push_back(id.get<int32_t>());
  }
  return prompt;
}

absl::StatusOr<Prompt> ParsePlainLine(const std::string& line, const std::string& where,
                                      int64_t vocab) {
  Prompt prompt;
  for (const absl::string_view word :
       absl::StrSplit(line, absl::ByAnyChar(" \t,"), absl::SkipEmpty())) {
    int32_t id = 0;
    if (!absl::SimpleAtoi(word, &id) || id < 0 || id >= vocab) {
      return Wrong(where, absl::StrCat("token ids from 0 to ", vocab - 1),
                   Shown(std::string_view(word.data(), word.size())));
    }
    prompt.push_back(id);
  }
  return prompt;
}

}  // namespace

absl::StatusOr<std::vector<Prompt>> ParseTraffic(const std::string& text, const std::string& where,
                                                 int64_t vocab) {
  std::vector<Prompt> prompts;
  int64_t number = 0;
  for (const absl::string_view raw : absl::StrSplit(text, '\n')) {
    ++number;
    const std::string line(absl::StripAsciiWhitespace(raw));
    if (line.empty()) continue;
    const std::string here = absl::StrCat(where, ":", number);
    const bool is_json = line.front() == '[' || line.front() == '{';
    SLUICE_ASSIGN_OR_RETURN(prompts.emplace_back(), is_json ? ParseJsonLine(line, here, vocab)
                                                            : ParsePlainLine(line, here, vocab));
    if (prompts.back().empty()) return Wrong(here, "token ids", "none");
  }
  if (prompts.empty()) return Wrong(where, "prompts, one a line", "none");
  return prompts;
}

absl::StatusOr<std::vector<Prompt>> ReadTraffic(const std::string& path, int64_t vocab) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  std::ostringstream text;
  text << file.rdbuf();
  return ParseTraffic(text.str(), path, vocab);
}

std::vector<Prompt> RandomTraffic(int64_t count, int64_t tokens, int64_t vocab, uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<Prompt> prompts(static_cast<size_t>(count));
  for (Prompt& prompt : prompts) {
    for (int64_t i = 0; i < tokens; ++i) {
      prompt.push_back(static_cast<int32_t>(random.Below(static_cast<uint64_t>(vocab))));
    }
  }
  return prompts;
}

}  // namespace sluice
