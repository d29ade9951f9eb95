// The free numbers of pages, or of slabs of pages, kept as runs of neighbours. Not thread-safe.
#pragma once

#include <cstdint>
#include <set>
#include <utility>

namespace sluice {

struct PageRun {
  int32_t first = 0;
  int32_t count = 0;
};

class PageRuns {
 public:
  // Takes at most `count` neighbours out and returns them. They come from the run that begins at
  // `wanted` if there is one, else from the smallest run that holds them all, else from the
  // largest. Allocates nothing. REQUIRES: there is a run.
  PageRun Take(int64_t count, int32_t wanted);
  // Adds a run. REQUIRES: none of its numbers is here.
  void Add(PageRun run);
  // Takes exactly this run out. REQUIRES: all of its numbers are here.
  void Cut(PageRun run);

  // The runs as (first, count): ascending, disjoint and never adjacent.
  const std::set<std::pair<int32_t, int32_t>>& runs() const { return runs_; }

 private:
  std::set<std::pair<int32_t, int32_t>> runs_;
};

}  // namespace sluice
