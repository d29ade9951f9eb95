#include "src/attention/offload/gather_plan.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace sluice {
namespace {

// Cuts [0, total) into `of` pieces, equal to within one.
int64_t Cut(int64_t total, int64_t piece, int64_t of) { return total * piece / of; }

}  // namespace

GatherPlan::GatherPlan(int max_rows, int lists_per_row)
    : lists_per_row_(static_cast<size_t>(lists_per_row)) {
  ranges_.reserve(static_cast<size_t>(max_rows) * lists_per_row_);
}

void GatherPlan::Make(int worker, absl::Span<const int32_t> counts,
                      absl::Span<const uint64_t> servers) {
  ranges_.clear();
  entries_ = 0;
  const uint64_t bit = uint64_t{1} << worker;
  for (size_t row = 0; row < servers.size(); ++row) {
    if ((servers[row] & bit) == 0) continue;
    const auto lists = counts.subspan(row * lists_per_row_, lists_per_row_);
    const int64_t total = std::accumulate(lists.begin(), lists.end(), int64_t{0});
    const int64_t of = std::popcount(servers[row]), rank = std::popcount(servers[row] & (bit - 1));
    AddRow(counts, row, Cut(total, rank, of), Cut(total, rank + 1, of));
  }
}

// Adds the entries [begin, end) of a row, whose lists follow one another.
void GatherPlan::AddRow(absl::Span<const int32_t> counts, size_t row, int64_t begin, int64_t end) {
  entries_ += end - begin;
  int64_t at = 0;
  for (size_t list = row * lists_per_row_; list < (row + 1) * lists_per_row_; ++list) {
    const int64_t from = std::max(begin - at, int64_t{0});
    const int64_t to = std::min(end - at, int64_t{counts[list]});
    if (from < to) {
      ranges_.push_back(
          {static_cast<int32_t>(list), static_cast<int32_t>(from), static_cast<int32_t>(to)});
    }
    at += counts[list];
  }
}

}  // namespace sluice
