// Numbers that are free, in runs of neighbours: pages, or slabs of them. Not thread-safe.
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
  // Takes at most `count` neighbours out: from the run that begins at `wanted`, if there is one;
  // else from the smallest that holds all; else the largest. Allocates nothing. REQUIRES: there is
  // one.
  PageRun Take(int64_t count, int32_t wanted);
  // REQUIRES: none of them is here.
  void Add(PageRun run);
  // Takes exactly these out. REQUIRES: all of them are here.
  void Cut(PageRun run);

  // (first, count), ascending, disjoint, never adjacent.
  const std::set<std::pair<int32_t, int32_t>>& runs() const { return runs_; }

 private:
  std::set<std::pair<int32_t, int32_t>> runs_;
};

}  // namespace sluice
