#include "src/request/stop_conditions.h"

#include <algorithm>
#include <utility>

namespace sluice {

StopConditions::StopConditions(std::vector<int32_t> stop_ids, std::vector<std::string> stop_strings,
                               uint32_t min_tokens)
    : stop_ids_(std::move(stop_ids)),
      stop_strings_(std::move(stop_strings)),
      min_tokens_(min_tokens) {
  for (const std::string& text : stop_strings_) longest_ = std::max(longest_, text.size());
}

std::optional<StopConditions::Match> StopConditions::Take(int32_t id, const std::string* bytes) {
  ++taken_;
  // The sampler masks stop ids for the first min_tokens tokens, but a handed-over token may still
  // be one.
  if (taken_ > min_tokens_ &&
      std::find(stop_ids_.begin(), stop_ids_.end(), id) != stop_ids_.end()) {
    return Match{id, std::nullopt};
  }
  if (stop_strings_.empty() || bytes == nullptr) return std::nullopt;

  const size_t old_size = tail_.size();
  tail_ += *bytes;
  std::optional<Match> match;
  size_t first_end = std::string::npos;
  for (const std::string& text : stop_strings_) {
    // A match must end inside the new bytes, because earlier ones were seen before.
    const size_t from = old_size >= text.size() ? old_size - text.size() + 1 : 0;
    const size_t at = tail_.find(text, from);
    if (at == std::string::npos || at + text.size() >= first_end) continue;
    first_end = at + text.size();
    match = Match{std::nullopt, text};
  }
  if (match.has_value() && taken_ >= min_tokens_) return match;
  if (tail_.size() >= longest_) tail_.erase(0, tail_.size() - (longest_ - 1));
  return std::nullopt;
}

}  // namespace sluice
