// Plans which entries of a step's lists each CPU worker gathers, and in which part of the move. A
// plan follows from the lengths of the lists alone, so workers need no word among themselves. Only
// gather_mover.cc uses it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace sluice {

class GatherPlan {
 public:
  // The entries [begin, end) of one list.
  struct Range {
    int32_t list;
    int32_t begin, end;
  };

  // A worker's task is one part of `parts` of all that it gathers in a step.
  struct Task {
    int worker = 0;
    int part = 0;
    int parts = 1;
  };

  // Reserves memory for steps of up to `max_rows` rows, `kv_heads` KV heads and `workers` workers.
  GatherPlan(int max_rows, int kv_heads, int workers);

  // Plans `task`. `counts` are the entries of the lists, [rows][kv_heads], and `servers` the
  // workers that gather for each row, [rows], as bits; 0: nobody does. The servers of a row share
  // its entries equally, in the order of the lists, and each of them cuts what it has into equal
  // parts. So every entry of a served row belongs to one worker and one part.
  void Make(const Task& task, absl::Span<const int32_t> counts, absl::Span<const uint64_t> servers);

  const std::vector<Range>& ranges() const { return ranges_; }  // none is empty
  int64_t entries() const { return entries_; }                  // of all ranges
  // Returns how many entries of the same part belong to workers before this one.
  int64_t before() const { return before_; }

  // Returns the maximum number of entries in one part, of one worker and of all workers, where the
  // lists have up to `total` entries.
  static int64_t MostOfOne(int64_t total, int parts) { return (total + parts - 1) / parts; }
  static int64_t MostOfAll(int64_t total, int parts, int workers) {
    return total / parts + workers;  // each worker's part is rounded up
  }

 private:
  int64_t EntriesOf(absl::Span<const int32_t> counts, size_t row) const;
  void AddRow(absl::Span<const int32_t> counts, size_t row, int64_t begin, int64_t end);

  const size_t kv_heads_;
  std::vector<int64_t> totals_;  // [workers] entries of all parts
  std::vector<Range> ranges_;
  int64_t entries_ = 0, before_ = 0;
};

}  // namespace sluice
