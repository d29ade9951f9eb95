#include "src/attention/offload/gather_plan.h"

#include <algorithm>
#include <bit>

namespace sluice {
namespace {

// Cuts [0, total) into `of` pieces, equal to within one.
int64_t Cut(int64_t total, int64_t piece, int64_t of) { return total * piece / of; }

}  // namespace

GatherPlan::GatherPlan(int max_rows, int kv_heads, int workers)
    : kv_heads_(static_cast<size_t>(kv_heads)), totals_(static_cast<size_t>(workers)) {
  ranges_.reserve(static_cast<size_t>(max_rows) * kv_heads_);
}

int64_t GatherPlan::EntriesOf(absl::Span<const int32_t> counts, size_t row) const {
  int64_t entries = 0;
  for (const int32_t count : counts.subspan(row * kv_heads_, kv_heads_)) entries += count;
  return entries;
}

void GatherPlan::Make(const Task& task, absl::Span<const int32_t> counts,
                      absl::Span<const uint64_t> servers) {
  ranges_.clear();
  std::fill(totals_.begin(), totals_.end(), 0);
  for (size_t row = 0; row < servers.size(); ++row) {
    const int64_t entries = EntriesOf(counts, row), of = std::popcount(servers[row]);
    int64_t rank = 0;
    for (uint64_t left = servers[row]; left != 0; left &= left - 1, ++rank) {
      totals_[static_cast<size_t>(std::countr_zero(left))] +=
          Cut(entries, rank + 1, of) - Cut(entries, rank, of);
    }
  }
  const auto begin_of = [&](int64_t total) { return Cut(total, task.part, task.parts); };
  const auto end_of = [&](int64_t total) { return Cut(total, task.part + 1, task.parts); };
  before_ = 0;
  for (int w = 0; w < task.worker; ++w) {
    const int64_t total = totals_[static_cast<size_t>(w)];
    before_ += end_of(total) - begin_of(total);
  }
  const int64_t mine = totals_[static_cast<size_t>(task.worker)];
  const int64_t begin = begin_of(mine), end = end_of(mine);
  entries_ = end - begin;

  const uint64_t bit = uint64_t{1} << task.worker;
  int64_t at = 0;  // entries of this worker in the rows so far
  for (size_t row = 0; row < servers.size() && at < end; ++row) {
    if ((servers[row] & bit) == 0) continue;
    const int64_t entries = EntriesOf(counts, row), of = std::popcount(servers[row]);
    const int64_t rank = std::popcount(servers[row] & (bit - 1));
    const int64_t first = Cut(entries, rank, of), last = Cut(entries, rank + 1, of);
    AddRow(counts, row, std::max(first, first + begin - at), std::min(last, first + end - at));
    at += last - first;
  }
}

// Adds the entries [begin, end) of a row, whose lists follow one another.
void GatherPlan::AddRow(absl::Span<const int32_t> counts, size_t row, int64_t begin, int64_t end) {
  int64_t at = 0;
  for (size_t list = row * kv_heads_; list < (row + 1) * kv_heads_; ++list) {
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
