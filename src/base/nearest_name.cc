#include "src/base/nearest_name.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

// Returns the number of edits between two names: insertions, deletions, substitutions, and swaps of
// neighbours.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> before_last(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] =
          std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0u : 1u)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before_last[j - 2] + 1);
      }
    }
    before_last.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

}  // namespace

std::string DidYouMean(std::string_view name, std::span<const std::string> candidates) {
  size_t best_distance = std::numeric_limits<size_t>::max();
  const std::string* best = nullptr;
  for (const std::string& candidate : candidates) {
    const size_t distance = EditDistance(name.substr(0, 2 * candidate.size()), candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = &candidate;
    }
  }
  // With more edits than half of its letters, a guess is noise.
  if (best == nullptr || best_distance > best->size() / 2) return "";
  return absl::StrCat(" (did you mean ", *best, "?)");
}

}  // namespace sluice
