// Plans which entries of a step's lists each CPU worker gathers. A plan follows from the lengths of
// the lists alone, so workers need no word among themselves. Only gather_mover.cc uses it.
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

  // Reserves memory for steps of up to `max_rows` rows of `lists_per_row` lists.
  GatherPlan(int max_rows, int lists_per_row);

  // Plans what `worker` gathers. `counts` are the entries of the lists, [rows][lists_per_row], and
  // `servers` the workers that gather for each row, [rows], as bits; 0: nobody does. The servers of
  // a row share its entries equally, in the order of the lists. So every entry of a served row
  // belongs to one worker.
  void Make(int worker, absl::Span<const int32_t> counts, absl::Span<const uint64_t> servers);

  const std::vector<Range>& ranges() const { return ranges_; }  // none is empty
  int64_t entries() const { return entries_; }                  // of all ranges

 private:
  void AddRow(absl::Span<const int32_t> counts, size_t row, int64_t begin, int64_t end);

  const size_t lists_per_row_;
  std::vector<Range> ranges_;
  int64_t entries_ = 0;
};

}  // namespace sluice
